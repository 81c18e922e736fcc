"""`quantkit calib ls | show | make | verify`: the named calibration sets."""

from __future__ import annotations

import textwrap
from typing import Annotated, Final

import typer

from quantkit.cli.group import OneLineErrors
from quantkit.errors import InputError
from quantkit.reporting.text import Table, plain_table, printable, size

_WIDTH: Final = 100

calib_app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
Name = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="A set, or the folder of one.")
]


@calib_app.callback(invoke_without_command=True)
def calib(context: typer.Context) -> None:
    """List, show, make and verify calibration sets.

    A set is a folder calib/NAME with a manifest.toml: the source of its data, its licence and the
    hashes that fix it. Those of the working directory come first, then those that ship. Every
    --calib, --eval and --data takes its name.

    \b
    Examples:
      quantkit calib ls
      quantkit calib make mine --from texts/ --samples 256 --licence CC-BY-4.0
      quantkit calibrate smollm2 --calib mine
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@calib_app.command()
def ls() -> None:
    """List the sets that --calib, --eval and --data know by name.

    \b
    Examples:
      quantkit calib ls
    """
    from quantkit.calib_sets.find import all_sets, broken_sets
    from quantkit.calib_sets.preview import samples_text

    rows = [
        (
            found.name,
            found.manifest.kind,
            found.manifest.licence,
            found.where,
            samples_text(found.manifest),
            size(found.manifest.bytes) if found.manifest.bytes else "",
        )
        for found in sorted(all_sets(), key=lambda found: found.name)
    ]
    columns = ("name", "kind", "licence", "where", "samples", "size")
    table = Table(title="Calibration sets", columns=columns, rows=tuple(rows), text_columns=4)
    typer.echo(plain_table(table), nl=False)
    for name, what in sorted(broken_sets().items()):
        typer.echo(f"broken: {printable(name)}: {printable(what)}")


@calib_app.command()
def show(
    name: Name,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=0, help="Samples to print.")
    ] = 3,
) -> None:
    """Print what a set is, and a few of its samples.

    Its content is read and hashed, which takes time in proportion to its size. Text is printed as
    text: how it is cut into tokens depends on the model.

    \b
    Examples:
      quantkit calib show retrieval --samples 1
    """
    from quantkit.calib_sets.check import verified
    from quantkit.calib_sets.find import named_set
    from quantkit.calib_sets.preview import described, preview

    found = named_set(name)
    content, info = verified(found)
    table = Table(
        title=f"Calibration set {found.name}",
        columns=("field", "value"),
        rows=tuple(described(found, info)),
        text_columns=2,
    )
    typer.echo(plain_table(table), nl=False)
    if found.manifest.description:
        typer.echo(f"\n{textwrap.fill(printable(found.manifest.description), _WIDTH)}")
    for label, words in preview(found.manifest, content, samples):
        lines = [printable(line) for line in words.splitlines()]
        typer.echo(f"\n{printable(label)}\n{textwrap.indent(chr(10).join(lines), '  ')}")


@calib_app.command()
def make(
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, help="Name of the new set.")
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            show_default=False,
            help="A file, a folder, a .jsonl[#FIELD], a .npz or .npy; module:NAME[#VARIABLE], "
            "package:NAME/path, datasets:ID[:CONFIG]/SPLIT#FIELD, "
            "generator:retrieval?needles=4&queries=2&sentences=19, generator:shapes.",
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            show_default=False,
            help="text, tokens, images or arrays. Default: what the source looks like.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            metavar="N",
            show_default=False,
            help="Documents or images, drawn by --seed. Default: all, in their order.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the draw.")] = 0,
    licence: Annotated[
        str, typer.Option("--licence", metavar="TEXT", help="Of the data, e.g. CC-BY-4.0.")
    ] = "unknown",
    description: Annotated[
        str, typer.Option("--description", metavar="TEXT", show_default=False, help="In words.")
    ] = "",
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Keep a copy of the samples: the source is needed no more."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a set of this name.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            show_default=False,
            help="Of finished tokens: the folder of the tokenizer that made them.",
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size",
            metavar="N",
            show_default=False,
            help="Of finished tokens, without --tokenizer: the size of their vocabulary.",
        ),
    ] = 0,
) -> None:
    """Make the set calib/NAME from a source.

    It holds a manifest with the hashes of the source; --copy keeps its samples too. The source is
    read and hashed once, which takes time in proportion to its size.

    \b
    Examples:
      quantkit calib make mine --from texts/ --samples 256 --copy --licence CC-BY-4.0
      quantkit calib make photos --from ~/photos --samples 300
      quantkit calib make hard --from 'generator:retrieval?needles=8&queries=4' --samples 256
    """
    from quantkit.calib_sets.find import named_set
    from quantkit.calib_sets.make import SetRequest, make_set
    from quantkit.calib_sets.preview import samples_text

    request = SetRequest(
        name=name,
        source=source,
        kind=kind,
        samples=samples,
        seed=seed,
        licence=licence,
        description=description,
        copy=copy,
        force=force,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )
    folder = make_set(request)
    made = named_set(str(folder)).manifest
    typer.echo(f"{folder}: {made.kind}, {samples_text(made)} samples")


@calib_app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", show_default=False, help="Sets, or folders of sets."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that `ls` lists.")] = False,
) -> None:
    """Hash the content of sets again.

    A file that changed, is missing or was added is named: exit code 2. Takes time in proportion to
    the size of the sets.

    \b
    Examples:
      quantkit calib verify mine photos
      quantkit calib verify --all
    """
    from quantkit.calib_sets import verify_sets

    if bool(names) == every:
        raise InputError("name one or more sets, or give --all.")
    for found, info in verify_sets(names or ()):
        typer.echo(f"ok  {found.name}  sha256 {info.sha256[:10]}  ({found.where})")
        for warning in info.warnings:
            typer.echo(f"warning: {printable(warning)}", err=True)
