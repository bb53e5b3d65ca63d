"""``dp-transformers report``: recompute ε from the ledgers of finished trainings, compare it with their certificates,
and write the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..reports.findings import Report


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            help="Output folders of trainings; several on the same data add up.", exists=True, file_okay=False
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Where the page goes. Default: the first folder.")] = None,
    delta: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="The delta to state epsilon at. Default: the certificate's, or the smallest."),
    ] = None,
    same_data: Annotated[
        bool, typer.Option("--same-data", help="Add up folders though no digest shows that their data is the same.")
    ] = False,
    sign: Annotated[
        Path | None, typer.Option(help="Sign the certificates with this Ed25519 key (PEM), made if it is missing.")
    ] = None,
    signed_by: Annotated[
        str | None, typer.Option(help="Fail unless the certificates are signed by this public key (hex).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON, and write no page.")] = False,
) -> None:
    """Recompute epsilon from the ledger of RUN_DIRS, compare it with privacy.json, and write an HTML report.

    Needs neither torch, nor the model, nor the data. Exits with 1 where certificate, ledger and signature disagree.
    """
    from ..reports.findings import Report, look
    from ..reports.pages import write

    for run_dir in run_dirs:
        _refuse_parent(run_dir)
    if sign is not None:
        _sign(run_dirs, sign)
    found = Report([look(run_dir, signed_by) for run_dir in run_dirs], delta, same_data=same_data)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        _print(found)  # before the pictures, which take longer
        typer.echo("\n" + "\n".join(f"wrote {path}" for path in write(found, out or run_dirs[0])))
    if found.faults or found.not_signed:
        raise typer.Exit(1)


def _refuse_parent(folder: Path) -> None:
    """Raise ValueError if the folder is not an output folder but contains some, and name them."""
    from ..reports.certificate import CERTIFICATE_NAME
    from ..step.ledger import LEDGER_NAME

    if (folder / LEDGER_NAME).exists() or (folder / CERTIFICATE_NAME).exists():
        return
    if inside := sorted(ledger.parent.name for ledger in folder.glob(f"*/{LEDGER_NAME}")):
        raise ValueError(f"'{folder}' holds no run; these folders in it do: {', '.join(inside)}.")


def _sign(run_dirs: list[Path], key: Path) -> None:
    """Sign the certificates that agree with their ledgers."""
    from ..reports.certificate import disagreements, read
    from ..reports.signatures import new_key, sign

    if not key.exists():
        new_key(key)
        typer.echo(f"made the private key '{key}': nobody else may have it.", err=True)
    for run_dir in run_dirs:
        if disagreements(run_dir, read(run_dir)):
            typer.echo(f"not signed: certificate and ledger in '{run_dir}' do not agree.", err=True)
        else:
            typer.echo(f"signed the certificate in '{run_dir}': public key {sign(run_dir, key)}", err=True)


def _print(found: Report) -> None:
    for fault in found.faults:
        typer.echo(f"DISAGREES: {fault}", err=True)
    for sentence in found.not_signed:
        typer.echo(sentence, err=True)
    typer.echo(found.guarantee + "\n")
    if found.has_numbers:
        _print_table(found)
    for folder in found.folders:
        if folder.signed_by:
            typer.echo(f"\nsignature of '{folder.path}': {folder.signature}")


def _print_table(found: Report) -> None:
    from ..reports.words import table

    if found.faults:
        typer.echo("By the ledger as it is:\n")
    rows = table(found.certificate, found.curve)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"  {name:{width}}  {value}")
