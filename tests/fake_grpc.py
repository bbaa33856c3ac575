"""A Qdrant server in this process, spoken to by gRPC: a store's calls, answered by the embedded engine.

Faults are played by method: `fake.faults["Upsert"] = [StatusCode.UNAVAILABLE]` fails the next one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent import futures
from typing import Any

import grpc
from qdrant_client import QdrantClient, models
from qdrant_client import grpc as q
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc, grpc_to_payload

DONE = q.PointsOperationResponse(
    result=q.UpdateResult(operation_id=1, status=q.UpdateStatus.Completed), time=0
)


class _Points(q.PointsServicer):
    def __init__(self, engine: QdrantClient) -> None:
        self.engine = engine

    def Upsert(self, asked: Any, context: Any) -> Any:  # noqa: N802
        self.engine.upsert(asked.collection_name, [GrpcToRest.convert_point_struct(p) for p in asked.points])
        return DONE

    def Delete(self, asked: Any, context: Any) -> Any:  # noqa: N802
        self.engine.delete(asked.collection_name, GrpcToRest.convert_points_selector(asked.points))
        return DONE

    def CreateFieldIndex(self, asked: Any, context: Any) -> Any:  # noqa: N802
        assert asked.field_type == q.FieldType.FieldTypeKeyword
        return DONE

    def Get(self, asked: Any, context: Any) -> Any:  # noqa: N802
        found = self.engine.retrieve(
            asked.collection_name,
            [GrpcToRest.convert_point_id(i) for i in asked.ids],
            **_selectors(asked),
        )
        return q.GetResponse(result=[_record(r) for r in found])

    def Scroll(self, asked: Any, context: Any) -> Any:  # noqa: N802
        found, following = self.engine.scroll(
            asked.collection_name,
            GrpcToRest.convert_filter(asked.filter) if asked.HasField("filter") else None,
            asked.limit,
            offset=GrpcToRest.convert_point_id(asked.offset) if asked.HasField("offset") else None,
            **_selectors(asked),
        )
        after = None if following is None else RestToGrpc.convert_extended_point_id(following)
        return q.ScrollResponse(result=[_record(r) for r in found], next_page_offset=after)

    def Count(self, asked: Any, context: Any) -> Any:  # noqa: N802
        count = self.engine.count(asked.collection_name, exact=asked.exact).count
        return q.CountResponse(result=q.CountResult(count=count))

    def QueryBatch(self, asked: Any, context: Any) -> Any:  # noqa: N802
        requests = [GrpcToRest.convert_query_points(each) for each in asked.query_points]
        answers = self.engine.query_batch_points(asked.collection_name, requests)
        return q.QueryBatchResponse(
            result=[
                q.BatchResult(result=[RestToGrpc.convert_scored_point(p) for p in answer.points])
                for answer in answers
            ]
        )


def _record(found: models.Record) -> Any:
    return RestToGrpc.convert_record(found.model_copy(update={"payload": found.payload or {}}))


def _selectors(asked: Any) -> dict[str, Any]:
    return {
        "with_payload": GrpcToRest.convert_with_payload_interface(asked.with_payload),
        "with_vectors": GrpcToRest.convert_with_vectors_selector(asked.with_vectors)
        if asked.HasField("with_vectors")
        else False,
    }


class _Collections(q.CollectionsServicer):
    def __init__(self, engine: QdrantClient) -> None:
        self.engine = engine

    def List(self, asked: Any, context: Any) -> Any:  # noqa: N802
        names = [each.name for each in self.engine.get_collections().collections]
        return q.ListCollectionsResponse(collections=[q.CollectionDescription(name=n) for n in names])

    def ListAliases(self, asked: Any, context: Any) -> Any:  # noqa: N802
        found = self.engine.get_aliases().aliases
        return q.ListAliasesResponse(aliases=[RestToGrpc.convert_alias_description(a) for a in found])

    def CollectionExists(self, asked: Any, context: Any) -> Any:  # noqa: N802
        there = self.engine.collection_exists(asked.collection_name)
        return q.CollectionExistsResponse(result=q.CollectionExists(exists=there))

    def Get(self, asked: Any, context: Any) -> Any:  # noqa: N802
        info = self.engine.get_collection(asked.collection_name)
        made = RestToGrpc.convert_collection_info(info)
        return q.GetCollectionInfoResponse(result=made)

    def Create(self, asked: Any, context: Any) -> Any:  # noqa: N802
        self.engine.create_collection(
            asked.collection_name,
            GrpcToRest.convert_vectors_config(asked.vectors_config),
            metadata=grpc_to_payload(asked.metadata),
        )
        return q.CollectionOperationResponse(result=True)

    def Delete(self, asked: Any, context: Any) -> Any:  # noqa: N802
        self.engine.delete_collection(asked.collection_name)
        return q.CollectionOperationResponse(result=True)

    def Update(self, asked: Any, context: Any) -> Any:  # noqa: N802
        self.engine.update_collection(asked.collection_name, metadata=grpc_to_payload(asked.metadata))
        return q.CollectionOperationResponse(result=True)

    def UpdateAliases(self, asked: Any, context: Any) -> Any:  # noqa: N802
        self.engine.update_collection_aliases(
            [GrpcToRest.convert_alias_operations(each) for each in asked.actions]
        )
        return q.CollectionOperationResponse(result=True)


class _Root(q.QdrantServicer):
    def HealthCheck(self, asked: Any, context: Any) -> Any:  # noqa: N802
        return q.HealthCheckReply(title="qdrant", version="1.18.0")


class _Faults(grpc.ServerInterceptor):
    """Counts calls by method, and fails those that are to fail."""

    def __init__(self, fake: FakeGrpc) -> None:
        self.fake = fake

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method.rsplit("/", 1)[-1]
        self.fake.calls[method] += 1
        self.fake.keys.update(value for key, value in details.invocation_metadata if key == "api-key")
        if self.fake.faults[method]:
            code = self.fake.faults[method].pop(0)
            return grpc.unary_unary_rpc_method_handler(lambda asked, context: context.abort(code, "told to"))
        return continuation(details)


class FakeGrpc:
    """Serves on a port of its own until `stop`."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.engine = QdrantClient(location=":memory:")
        self.credentials = credentials
        self.calls: Counter[str] = Counter()
        self.faults: defaultdict[str, list[grpc.StatusCode]] = defaultdict(list)
        self.keys: set[str] = set()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen, at the same port as before."""
        # One thread: the embedded engine takes one call at a time.
        self._server = grpc.server(
            futures.ThreadPoolExecutor(1),
            interceptors=[_Faults(self)],
            options=[("grpc.max_receive_message_length", -1)],
        )
        q.add_PointsServicer_to_server(_Points(self.engine), self._server)
        q.add_CollectionsServicer_to_server(_Collections(self.engine), self._server)
        q.add_QdrantServicer_to_server(_Root(), self._server)
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.credentials)
        self._server.start()

    def stop(self) -> None:
        """Go away."""
        self._server.stop(None).wait()
