"""``quantkit push``."""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.files import Outputs
from quantkit.cli.options import Command, exit_codes
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.report import report_result


@click.command(cls=Command, epilog=exit_codes(0, 2, 3))
@click.argument("path", type=options.PATH)
@click.argument("name")
@click.option("--public", is_flag=True, help="Create a public repository. Default: a private one.")
@click.option(
    "--base-model",
    metavar="NAME",
    help="For the model card: name of the source on the hub, owner/name.",
)
@click.option(
    "--license",
    metavar="NAME",
    help="For the model card: licence as hubs name it, such as apache-2.0.",
)
@click.option(
    "--revision", metavar="BRANCH", help="Branch to commit to; created if it is not there."
)
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@click.option(
    "--delete-others",
    is_flag=True,
    help="Delete all other files of the repository in the same commit.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check the model and list what would be sent; send nothing."
)
@options.data
def push(data: str | None, **params: Any) -> None:
    """Send a model to a repository on the Hugging Face hub.

    PATH is a folder or a GGUF file, NAME is owner/name. The model is checked first, as by doctor
    and with its manifest, and nothing is sent if an error is found. All files appear with one
    commit, and are compared with it. If it is interrupted, the same command continues. Log in
    before: hf auth login.
    """
    from quantkit.jobs.push.push import push as job

    outputs = Outputs(data)
    with ProgressDisplay() as progress:
        result = job(**params, on_steps=progress.expect, progress=progress)
    report_result(outputs, result)
