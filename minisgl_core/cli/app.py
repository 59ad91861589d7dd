"""The entry point of ``minisgl``: imports the command's module, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from minisgl_core import __version__
from minisgl_core.errors import MinisglError, nearest
from minisgl_core.settings.variables import check_variables

from .stderr import forgiving_stderr

__all__ = ["COMMANDS", "CommandEntry", "main"]

PROGRAM: Final = "minisgl"
_NO_STDOUT: Final = "standard output cannot be written: {}; redirect it to a file or a pipe that can be"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command that has not been imported. ``module`` contains a click command named ``command``."""

    module: str
    help: str


COMMANDS: Final[Mapping[str, CommandEntry]] = {
    "generate": CommandEntry("minisgl_core.cli.generate", "Generate answers to prompts."),
    "chat": CommandEntry("minisgl_core.cli.chat", "Chat with a model in the terminal."),
    "serve": CommandEntry("minisgl_core.cli.serve", "Serve a model through OpenAI's API."),
    "plugins": CommandEntry("minisgl_core.cli.plugins", "List installed plugins, their backends and failures."),
    "explain": CommandEntry("minisgl_core.cli.explain", "Show which backends would run, and why not the others."),
    "verify": CommandEntry("minisgl_core.cli.verify", "Run the conformance kit on a backend."),
    "replay": CommandEntry("minisgl_core.cli.replay", "Replay a step recording on a backend, without the model."),
    "calibrate": CommandEntry("minisgl_core.cli.calibrate", "Measure which backends are fastest on this machine."),
    "bench": CommandEntry("minisgl_core.cli.bench", "Measure throughput and latency on fixed workloads."),
    "bench online": CommandEntry(
        "minisgl_core.cli.bench_online", "Measure a server under a load of streamed requests."
    ),
    "doctor": CommandEntry("minisgl_core.cli.doctor", "Diagnose the installation and suggest remedies."),
    "new-plugin": CommandEntry("minisgl_core.cli.new_plugin", "Write a new plugin from a template."),
    "demo-model": CommandEntry("minisgl_core.cli.demo_model", "Download the demo model and print its path."),
}
"""Every command, in the order of the help."""


class _Commands(click.Group):
    """Lists the commands of :data:`COMMANDS`, and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else click.Command(cmd_name, help=entry.help)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *rest = args
        if rest and f"{name} {rest[0]}" in COMMANDS:
            name, rest = f"{name} {rest[0]}", rest[1:]
        if name not in COMMANDS:
            hint = nearest(name, COMMANDS) or f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"unknown command {name!r}; {hint}", ctx)
        command: click.Command = importlib.import_module(COMMANDS[name].module).command
        if all(param.name != "debug" for param in command.params):
            _debug_option(command)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their whole help; click would cut it to one line of the terminal."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


class _Errors:
    """Prints errors."""

    debug = False


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.ensure_object(_Errors).debug |= value


_debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show the traceback of an error.",
)


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_debug_option
@click.version_option(__version__, prog_name=PROGRAM)
@click.pass_context
def _app(ctx: click.Context) -> None:
    """Run Hugging Face language models on backends that are plugins."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    else:
        check_variables(os.environ)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 2 for an invalid call, 1 for a failure, 130 for Ctrl-C."""
    if arguments is None and sys.__stderr__ is not None:
        # A kernel that crashes ends the process: the traceback says whose.
        faulthandler.enable(sys.__stderr__)
    with forgiving_stderr():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    errors = _Errors()
    if sys.stdout is None:  # closed by the caller: all output would be lost silently
        return _fail(_NO_STDOUT.format(os.strerror(errno.EBADF)), 1, errors)
    try:
        result = _app.main(given, prog_name=PROGRAM, standalone_mode=False, obj=errors)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.Abort:  # Ctrl-C; click has ended the line
        return 130
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code, errors)
    except MinisglError as error:
        return _fail(error.headline, error.exit_code, errors, error.details)
    except BrokenPipeError:
        _drop_stdout()  # its reader has exited
        return 1
    except Exception as error:
        if isinstance(error, OSError) and _is_of_printing(error):
            _drop_stdout()
            return _fail(_NO_STDOUT.format(error.strerror), 1, errors)
        what = f"internal error: {type(error).__name__}: {error}; please report it with the traceback of --debug"
        return _fail(what, 1, errors)
    return result if isinstance(result, int) else 0


def _is_of_printing(error: OSError) -> bool:
    """True if the error was raised by a write of :func:`click.echo`; such an error names no file."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_code is click.echo.__code__


def _drop_stdout() -> None:
    """Replace stdout, so that Python does not report the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int, errors: _Errors, details: Sequence[str] = ()) -> int:
    if errors.debug:
        traceback.print_exc()
    lines = (f"error: {message}", *details)
    click.echo("\n  ".join(" ".join(line.split()) for line in lines), err=True)
    return code
