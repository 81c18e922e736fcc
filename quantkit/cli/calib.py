"""`quantkit calib ls | show | make | verify`: the named calibration sets."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import Annotated, Final

import typer

from quantkit.cli import complete, options
from quantkit.cli.group import SETTINGS, OneLineErrors
from quantkit.cli.help import OneCommand
from quantkit.errors import InputError
from quantkit.reporting.text import Table, plain_table, printable, size

_WIDTH: Final = 100

calib_app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)
Name = Annotated[
    str, options.argument("NAME", "A set, or the folder of one.", autocompletion=complete.sets)
]


@calib_app.callback(invoke_without_command=True)
def calib(context: typer.Context) -> None:
    """List, show, make and verify calibration sets.

    A set is a folder calib/NAME with a manifest.toml: the source of its data, its licence and the
    hashes that fix it. Those of the working directory come first, then those that ship. Every
    --calib, --eval and --data takes its name.

    Examples:
      quantkit calib ls
      quantkit calib make mine --from texts/ --samples 256 --licence CC-BY-4.0
      quantkit calibrate smollm2 --calib mine
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@calib_app.command(cls=OneCommand)
def ls(as_json: options.Json = False) -> None:
    """List the sets that --calib, --eval and --data know by name.

    They also take a text file, a folder or a .jsonl file, by its path.

    Examples:
      quantkit calib ls
      quantkit calib ls --json
    """
    from quantkit.calib_sets.find import all_sets, broken_sets
    from quantkit.calib_sets.preview import samples_text

    sets = sorted(all_sets(), key=lambda found: found.name)
    if as_json:
        listed = [{"where": found.where, **asdict(found.manifest)} for found in sets]
        typer.echo(json.dumps({"sets": listed, "broken": broken_sets()}, indent=1))
        return
    rows = [
        (
            found.name,
            found.manifest.kind,
            found.manifest.licence,
            found.where,
            samples_text(found.manifest),
            size(found.manifest.bytes) if found.manifest.bytes else "",
        )
        for found in sets
    ]
    columns = ("name", "kind", "licence", "where", "samples", "size")
    table = Table(title="Calibration sets", columns=columns, rows=tuple(rows), text_columns=4)
    typer.echo(plain_table(table), nl=False)
    for name, what in sorted(broken_sets().items()):
        typer.echo(f"broken: {printable(name)}: {printable(what)}")


@calib_app.command(cls=OneCommand)
def show(
    name: Name,
    samples: Annotated[
        int,
        options.option(
            "--samples", panel=options.DATA, metavar="SAMPLES", min=0, help="Those to print."
        ),
    ] = 3,
) -> None:
    """Print what a set is, and a few of its samples.

    Its content is read and hashed, which takes time in proportion to its size. Text is printed as
    text: how it is cut into tokens depends on the model.

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


@calib_app.command(cls=OneCommand)
def make(
    name: Annotated[str, options.argument("NAME", "Name of the new set.")],
    source: Annotated[
        str,
        options.option(
            "--from",
            panel=options.DATA,
            metavar="SOURCE",
            help="A file, a folder, a .jsonl[#FIELD], a .npz or .npy; module:NAME[#VARIABLE], "
            "package:NAME/path, datasets:ID[:CONFIG]/SPLIT#FIELD, "
            "generator:retrieval?needles=4&queries=2&sentences=19, generator:shapes.",
        ),
    ],
    kind: Annotated[
        str | None,
        options.option(
            "--kind",
            panel=options.DATA,
            metavar="KIND",
            show_default="what the source looks like",
            help="text, tokens, images or arrays.",
            autocompletion=complete.one_of("text", "tokens", "images", "arrays"),
        ),
    ] = None,
    samples: Annotated[
        int | None,
        options.option(
            "--samples",
            panel=options.DATA,
            metavar="DOCUMENTS",
            show_default="all, in their order",
            help="Documents or images that are drawn, by --seed.",
        ),
    ] = None,
    seed: Annotated[
        int, options.option("--seed", panel=options.DATA, metavar="N", help="Of the draw.")
    ] = 0,
    licence: Annotated[
        str,
        options.option(
            "--licence",
            panel="What the manifest says",
            metavar="TEXT",
            help="Of the data, e.g. CC-BY-4.0.",
        ),
    ] = "unknown",
    description: Annotated[
        str,
        options.option(
            "--description",
            panel="What the manifest says",
            metavar="TEXT",
            show_default="none",
            help="In words.",
        ),
    ] = "",
    tokenizer: Annotated[
        str | None,
        options.option(
            "--tokenizer",
            panel="Of finished tokens",
            metavar="DIR",
            show_default="none",
            help="Folder of the tokenizer that made them.",
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        options.option(
            "--vocab-size",
            panel="Of finished tokens",
            metavar="TOKENS",
            show_default="unknown",
            help="Without --tokenizer: the size of their vocabulary.",
        ),
    ] = 0,
    copy: Annotated[
        bool,
        options.option(
            "--copy",
            panel=options.OUTPUT,
            help="Keep a copy of the samples: the source is needed no more.",
        ),
    ] = False,
    force: Annotated[
        bool, options.option("--force", panel=options.OUTPUT, help="Replace a set of this name.")
    ] = False,
    config: options.Config = None,
) -> None:
    """Make the set calib/NAME from a source.

    It holds a manifest with the hashes of the source; --copy keeps its samples too. The source is
    read and hashed once, which takes time in proportion to its size.

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


@calib_app.command(cls=OneCommand)
def verify(
    names: Annotated[
        list[str] | None,
        options.argument("[NAME]", "Sets, or folders of sets.", autocompletion=complete.sets),
    ] = None,
    every: Annotated[
        bool, options.option("--all", panel=options.DATA, help="All that `ls` lists.")
    ] = False,
) -> None:
    """Hash the content of sets again.

    A file that changed, is missing or was added is named: exit code 2. Takes time in proportion to
    the size of the sets.

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
