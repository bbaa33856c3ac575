"""`verify-endpoint`: does a server give the vectors that this package expects?"""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines import options, show
from rag_embfilter.errors import ConfigError

SHOWN = {"same": "[green]yes[/]", "near": "[yellow]nearly[/]", "refused": "[red]refused[/]"}


@show.guarded
def verify_endpoint(
    endpoint: Annotated[
        str, typer.Argument(metavar="URL", help="Its address; a key is read from EMBFILTER_ENDPOINT_KEY.")
    ],
    backbone: options.Backbone = "smollm2",
    revision: options.Revision = None,
    unembedding_from: options.UnembeddingFrom = None,
    template: options.Templates = ["prompteol"],  # noqa: B006 - typer copies it
    pooling: options.Pooling = None,
    endpoint_model: options.EndpointModel = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Compare a server that encodes with the local backbone, and name what differs.

    A few texts are encoded by both, as token ids and as text. Wrong pooling, an end token after the prompt,
    begin tokens too many or too few, a template applied twice or not at all are told from other weights. The
    exit code is 1 when the server can be used with neither kind of prompt.
    """
    from rag_embfilter.endpoint import EndpointClient
    from rag_embfilter.verifying import verify

    if len(template) > 1 or pooling == "last+mean":
        raise ConfigError("a server is verified with one template and one pooling at a time.")
    client = EndpointClient(endpoint, endpoint_model or backbone, endpoint_model is None)
    backbone = options.lent(backbone, unembedding_from)
    encoder = options.make_encoder(backbone, revision, template, None, pooling, 512, device, dtype)
    try:
        findings = verify(client, encoder)
    finally:
        client.close()
    rows = [
        [
            each.prompts,
            SHOWN.get(each.verdict, "[red]no[/]"),
            "" if each.cosine is None else f"{each.cosine:.5f}",
            "" if each.normalised is None else ("yes" if each.normalised else "no"),
        ]
        for each in findings
    ]
    show.out.print(
        show.table(
            f"{client.url}, {client.model}", ["prompts", "right", "cosine", "unit length"], rows, left=2
        )
    )
    for each in findings:
        show.out.print(f"{each.prompts}: {show.escape(each.detail)}.", soft_wrap=True)
    good = [each.prompts for each in findings if each.good]
    if not good:
        show.err.print(
            "[red]This server does not give the expected vectors;[/] docs/serving.md has the commands."
        )
        raise typer.Exit(1)
    other = "" if "tokens" in good else " --endpoint-prompts text"
    show.out.print(
        f"Use it with --endpoint {show.escape(endpoint)}{other}. Vectors are scaled here in any case."
    )
