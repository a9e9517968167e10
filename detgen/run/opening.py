"""The start of a run: locks its output folder and inspects its input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from detgen.errors import OutputError, PromptsError, RequestError, RunError
from detgen.outputs import FolderLostError, OutputFolder
from detgen.progress import Observer
from detgen.prompts import Inspection, Prompts, open_prompts, spooled_prompts
from detgen.run.interface import RunConfig, ScoreConfig


@contextmanager
def opened_run(
    config: RunConfig | ScoreConfig, observer: Observer
) -> Iterator[tuple[OutputFolder, Prompts, Inspection]]:
    """Lock the output folder and inspect the input.

    Raises:
        RunError: if something is wrong with either, also later in the block.
    """
    suffix = "out" if isinstance(config, RunConfig) else "scores"
    try:
        if config.prompts == "-":
            with OutputFolder(config.output or Path(f"stdin-{suffix}"), observer.message) as folder:
                source = _receive(folder, config)
                inspection = source.inspect()
                _check_json(source)
                yield folder, source, inspection
        else:
            source = open_prompts(config.prompts, config.prompt_column)
            output = config.output or Path(f"{source.stem}-{suffix}")
            _check_apart(source, output)
            inspection = source.inspect()
            with OutputFolder(output, observer.message) as folder:
                yield folder, source, inspection
    except FolderLostError as error:
        raise RunError(f"{error}; run the same command again") from error
    except (PromptsError, OutputError) as error:
        raise RunError(str(error)) from error


def _receive(folder: OutputFolder, config: RunConfig | ScoreConfig) -> Prompts:
    """Return the piped prompts; if there are none, those of the run to be resumed."""
    piped = config.piped
    if piped is None and sys.stdin is not None and not sys.stdin.isatty():
        piped = sys.stdin.buffer
    if piped is not None and (received := folder.receive(piped)):
        return spooled_prompts(received, config.prompt_column)
    if not config.overwrite and (kept := folder.kept()):
        return spooled_prompts(kept, config.prompt_column)
    raise RunError("no prompts on standard input; pipe JSON lines into detgen, or name a file")


def _check_json(source: Prompts) -> None:
    """Refuse plain text on standard input before a model is loaded."""
    for _, item in source.items():
        with suppress(RequestError):
            if isinstance(source.decode(item), dict):
                return
    raise RunError(
        'no line of standard input is a JSON object; pipe lines such as {"prompt": "..."}, or write plain text to a'
        " .txt file and name that (detgen run also takes a text as --prompt TEXT)"
    )


def _check_apart(source: Prompts, output: Path) -> None:
    """Keep a run from writing into its own input."""
    if source.path is None:
        return
    place, target = source.path.resolve(), output.resolve()
    if target == place.parent if place.is_file() else target.is_relative_to(place):
        raise RunError(f"the output folder {output} is where the prompts are; choose another one with -o")
