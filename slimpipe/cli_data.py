"""`slimpipe data build | prepare | show`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slimpipe.config import load_config
from slimpipe.data import DataError, RunData, TextTokenizer, TokenFile, load_tokenizer, open_data
from slimpipe.data.build import build_tokens, learn_tokenizer, processes_for
from slimpipe.data.corpus import find_tokens, open_corpus
from slimpipe.data.indexed import bin_path, idx_path
from slimpipe.data.tokens import tokenizer_path
from slimpipe.telling import told_in_one_line

data_app = typer.Typer(
    help="Build token files, and look into them. docs/data.md is a guide.", no_args_is_help=True, rich_markup_mode=None
)

ProcessesOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that encode. Default: one a core, fewer for little text.")
]


@data_app.command()
def build(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files of text, JSON lines, Parquet or Arrow; folders; python_stdlib."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="PREFIX of PREFIX.bin and PREFIX.idx.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, a folder with one, or a model's name in Hugging Face's cache.")
    ] = None,
    learn_vocab: Annotated[
        int | None, typer.Option(help="Instead: learn a tokenizer of so many tokens from the input.")
    ] = None,
    text_key: Annotated[str, typer.Option(help="The key, or column, that has the text.")] = "text",
    end_of_text: Annotated[
        str | None, typer.Option(help="The tokenizer's token between documents. Default: its eos_token.")
    ] = None,
    append_end: Annotated[
        bool, typer.Option("--append-end/--no-append-end", help="Whether that token stands behind each document.")
    ] = True,
    processes: ProcessesOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a token file of that name.")] = False,
) -> None:
    """Encode text into a token file, as Megatron has them. Interrupted, it leaves nothing that passes for one."""
    with told_in_one_line(DataError):
        if (tokenizer is None) == (learn_vocab is None):
            raise DataError("--tokenizer: give either that or --learn-vocab, the size of one to learn from the input")
        if idx_path(output).exists() and not overwrite:
            raise DataError(f"--output = {output}: {idx_path(output)} exists; use --overwrite, or another name")
        if output.exists():  # which `data.corpus` would then take for the text
            raise DataError(f"--output = {output}: is there already, and no token file; use another name")
        if not output.parent.is_dir():
            raise DataError(f"--output = {output}: no folder {output.parent}; make it first")
        corpora = [open_corpus(name, "INPUT") for name in inputs]
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if learn_vocab is not None:
                learn_tokenizer(corpora, learn_vocab, folder, text_key, "INPUT", "--learn-vocab")
            else:
                load_tokenizer(str(tokenizer), end_of_text).save(folder)
            build_tokens(
                corpora,
                folder,
                output,
                text_key,
                end_of_text=append_end,
                processes=processes or processes_for(corpora),
                keep_tokenizer=True,
            )
        seconds, size = time.perf_counter() - started, sum(corpus.size for corpus in corpora)
        Console().print(_table(output, TokenFile.open(output)))
        typer.echo(f"{size / 1e6:.1f} MB in {seconds:.1f} s ({size / 1e6 / seconds:.1f} MB/s)")
        typer.echo(f"train on it with data.corpus={output}")


@data_app.command()
def prepare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As for slimpipe train.")] = None,
    processes: ProcessesOption = None,
) -> None:
    """Build what a run would build at its start, into data.cache_dir, and show what it will read."""
    with told_in_one_line(DataError):
        settings = load_config(config, overrides or [])
        data = open_data(settings.data, settings.model.vocab_size, settings.train.seed, processes=processes)
        data.train.require(settings.train.global_batch)
    Console().print(_run_table(data))


@data_app.command()
def show(
    path: Annotated[str, typer.Argument(metavar="PREFIX", help="Of a token file: PREFIX.bin and PREFIX.idx.")],
    documents: Annotated[int, typer.Option(min=0, help="Also the beginnings of so many documents.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="To show them as text. Default: the tokenizer beside the file.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read the whole file, and compare its sha256.")] = False,
) -> None:
    """Show what a token file holds."""
    with told_in_one_line(DataError):
        prefix = find_tokens(path)
        if prefix is None:
            raise DataError(f"{path}: no token file ({path}.bin and {path}.idx); slimpipe data build makes one")
        file = TokenFile.open(prefix)
        words = _words(prefix, tokenizer)
        if verify:
            file.verify()
    console = Console()
    console.print(_table(prefix, file))
    for number in range(min(documents, file.dataset.documents)):
        ids = file.dataset.document(number)[:64].tolist()
        text = repr(words.decode(ids)) if words is not None else " ".join(map(str, ids))
        console.print(f"document {number}: {text}", markup=False, highlight=False)
    if verify:
        typer.echo("its contents match their sha256")


def _words(prefix: Path, name: str | None) -> TextTokenizer | None:
    if name is not None:
        return load_tokenizer(name)
    folder = tokenizer_path(prefix)
    return load_tokenizer(folder) if folder.exists() else None


def _table(prefix: Path, file: TokenFile) -> Table:
    table = Table("", str(bin_path(prefix)), title_justify="left")
    dataset, description = file.dataset, file.description
    longest = int(dataset.lengths.max()) if len(dataset) else 0
    table.add_row("tokens", f"{file.count:,}")
    table.add_row("documents", f"{dataset.documents:,}")
    table.add_row("sequences", f"{len(dataset):,}, the longest of {longest:,} tokens")
    table.add_row("type", f"{dataset.tokens.dtype.name}, {file.count * dataset.tokens.dtype.itemsize / 1e6:,.1f} MB")
    if description is None:
        table.add_row("made by", "unknown: it has no description of slimpipe's")
    else:
        end = description.end_of_text
        table.add_row("made from", description.source)
        table.add_row("vocabulary", f"{description.vocab_size:,} (model.vocab_size: that or more)")
        table.add_row("between documents", "nothing" if end is None else f"token {end}")
    table.add_row("fingerprint", file.fingerprint[:16])
    return table


def _run_table(data: RunData) -> Table:
    table = Table("for", "source", "weight", "tokens", "sequences an epoch")
    for use, sampler in (("training", data.train), ("evaluation", data.evaluation)):
        for part, windows in zip(sampler.parts, sampler.windows, strict=True) if sampler is not None else ():
            table.add_row(use, part.source, f"{part.weight:g}", f"{part.count:,}", f"{windows:,}")
    return table
