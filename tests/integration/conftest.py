"""Fixtures for tests on a real Qdrant server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"
PATIENCE = 120  # seconds for a container to be ready


@pytest.fixture(scope="session")
def qdrant() -> Iterator[dict[str, Any]]:
    """Where a server is, as arguments of `Store`: the one QDRANT_URL names, else a container of our own."""
    if url := os.environ.get("QDRANT_URL"):
        port = int(os.environ.get("QDRANT_GRPC_PORT") or 6334)
        yield {"url": url, "api_key": os.environ.get("QDRANT_API_KEY"), "grpc_port": port}
        return
    container = _container()
    try:
        host = container.get_container_host_ip()
        url = f"http://{host}:{container.get_exposed_port(6333)}"
        _wait(url)
        yield {"url": url, "grpc_port": int(container.get_exposed_port(6334))}
    finally:
        container.stop()


def _container() -> Any:
    """A started container of the image that docker-compose.yml pins; skips where there can be none."""
    reason = "QDRANT_URL names no Qdrant server, and "
    try:
        import docker
        from testcontainers.core.container import DockerContainer
    except ImportError as error:
        pytest.skip(f"{reason}testcontainers is not installed ({error})")
    try:
        docker.from_env(timeout=5).ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"{reason}no Docker daemon answers ({error})")
    (image,) = re.findall(r"image: (qdrant/qdrant:\S+)", COMPOSE.read_text())
    container = DockerContainer(image).with_exposed_ports(6333, 6334)
    try:
        return container.start()
    except docker.errors.DockerException as error:
        container.stop()
        pytest.skip(f"{reason}{image} cannot be started ({error})")


def _wait(url: str) -> None:
    """Until the server says that it is ready."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"the container at {url} is not ready after {PATIENCE} s")
        time.sleep(0.2)
