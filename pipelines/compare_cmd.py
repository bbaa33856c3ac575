"""`compare`: two runs of `evaluate`, question by question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError
from rag_embfilter.files import write_json

Row = Annotated[
    str | None, typer.Option(metavar="FILTER", help="Only this row; by default those of one name.")
]


@show.guarded
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What `evaluate --json` wrote.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one, of the same sets.")],
    filter_a: Row = None,
    filter_b: Row = None,
    metric: Annotated[str, typer.Option(help="Any of the metrics per question.")] = "ndcg_at_10",
    json_file: options.JsonFile = None,
) -> None:
    """Compare two result files, B minus A, on the sets that both have.

    Sets must be the same to the last letter. Rows of one name are compared, or two that you name.
    """
    from rag_embfilter.metrics import compare as paired

    sides = [_sets(path) for path in (first, second)]
    names = [name for name in sides[0] if name in sides[1]]
    if not names:
        raise ConfigError(
            f"no set is in both files: {str(first)!r} has {sorted(sides[0])}, and {str(second)!r} has "
            f"{sorted(sides[1])}."
        )
    found: list[dict[str, Any]] = []
    for name in names:
        a, b = (side[name] for side in sides)
        if a["digest"] != b["digest"]:
            raise ConfigError(
                f"set {name!r} is not the same in both files (digest {a['digest']} and {b['digest']}): "
                "passages, questions or judgements differ, so nothing can be compared."
            )
        for one, other in _pairs(name, a, b, filter_a, filter_b):
            scores = [_scores(row, metric) for row in (one, other)]
            versus = paired(scores[1], scores[0])
            means = [sum(each.values()) / len(each) for each in scores]
            found.append(
                {
                    "set": name,
                    "a": one["filter"],
                    "b": other["filter"],
                    "means": means,
                    "b_minus_a": vars(versus),
                }
            )
    _print(found, metric)
    if json_file is not None:
        write_json(json_file, {"a": str(first), "b": str(second), "metric": metric, "comparisons": found})


def _sets(path: Path) -> dict[str, Any]:
    """Sets of a result file by name."""
    try:
        read = json.loads(path.read_text("utf-8"))
        return {each["eval_set"]: each for each in read["sets"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a result of `evaluate --json` ({type(error).__name__}: {error})."
        ) from error


def _pairs(
    name: str, a: Mapping[str, Any], b: Mapping[str, Any], filter_a: str | None, filter_b: str | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    rows = [{row["filter"]: row for row in side["results"]} for side in (a, b)]
    if filter_a or filter_b:
        wanted = [(filter_a or filter_b or "", filter_b or filter_a or "")]
    else:
        wanted = [(key, key) for key in rows[0] if key in rows[1]]
    if not wanted:
        raise ConfigError(
            f"set {name!r}: no row has the same name in both files. Name two with --filter-a "
            f"({', '.join(rows[0])}) and --filter-b ({', '.join(rows[1])})."
        )
    for (one, other), side in ((pair, side) for pair in wanted for side in (0, 1)):
        asked = other if side else one
        if asked not in rows[side]:
            raise ConfigError(
                f"set {name!r}: no row {asked!r} in file {'AB'[side]}; it has {', '.join(rows[side])}."
            )
    return [(rows[0][one], rows[1][other]) for one, other in wanted]


def _scores(row: Mapping[str, Any], metric: str) -> dict[str, float]:
    if metric not in row["per_query"]:
        raise ConfigError(f"metric {metric!r}: expected one of {', '.join(row['per_query'])}.")
    scores: dict[str, float] = row["per_query"][metric]
    return scores


def _print(found: list[dict[str, Any]], metric: str) -> None:
    rows = []
    for each in found:
        versus = each["b_minus_a"]
        colour = {"better": "green", "worse": "red"}.get(versus["verdict"], "dim")
        low, high = 100 * versus["low"], 100 * versus["high"]
        interval = f"{100 * versus['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
        rows.append(
            [
                show.escape(each["set"]),
                show.escape(each["a"] if each["a"] == each["b"] else f"{each['a']} / {each['b']}"),
                *(f"{100 * mean:.1f}" for mean in each["means"]),
                f"[{colour}]{show.escape(interval)}[/]",
                f"{versus['p_value']:.4f}",
                f"{versus['wins']}/{versus['ties']}/{versus['losses']}",
                versus["verdict"],
            ]
        )
    columns = ["set", "filter", "A", "B", "B - A [95% interval]", "p", "W/T/L", "B is"]
    show.out.print(show.table(f"{metric}, question by question", columns, rows, left=2))
