"""Files that replay a difference: they hold everything but the models themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from detgen.engine.config import EngineConfig
from detgen.engine.request import Request
from detgen.engine.sources import check_sources
from detgen.errors import CheckError, EngineError
from detgen.params import SamplingParams
from detgen.progress import Observer
from detgen.verify.explain.explaining import Explanation, explain
from detgen.verify.perturb.axes import TITLES, Setting
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.result import Case
from detgen.verify.perturb.running import Subject

_CONFIG = (
    *("target", "draft", "device", "dtype", "kv_dtype", "adapter", "target_quant", "draft_quant"),
    *("threads", "kv_memory", "batch_size"),
)


def save_replay(path: Path, found: Explanation, check: Check) -> str:
    """Write a file that replays a difference. Return the command that replays it, or why there is none."""
    case = found.case
    content = {
        "detgen": "verify-determinism",
        "config": {name: getattr(check.config, name) for name in _CONFIG},
        "profile": check.subject.engine().profile(),
        "seed": check.seed,
        "setting": asdict(case.setting),
        "long": check.pool.long,
        "requests": [asdict(r) | {"params": dict(r.params)} for r in case.watched],
        "found": found.as_dict(),
    }
    try:
        path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return f"detgen verify-determinism --replay {path}"


def load(path: Path) -> tuple[EngineConfig, Pool, int, Case]:
    """Load a file: the engine's configuration, the prompts, the seed, and the case.

    Raises:
        CheckError: if it is not such a file or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise CheckError(f"{path} is not a regular file")
    try:
        content = json.loads(path.read_bytes())
        if content["detgen"] != "verify-determinism":
            raise ValueError("another program wrote it")
        watched = [_request(r) for r in content["requests"]]
        if not watched:
            raise ValueError("it holds no requests")
        case = Case(_setting(content["setting"]), watched)
        config = EngineConfig(**content["config"])
        return config, Pool(watched, content["long"]), int(content["seed"]), case
    except OSError as error:
        raise CheckError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, EngineError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CheckError(f"{path} is not a reproduction file of detgen verify-determinism: {why}") from None


def again(path: Path, observer: Observer, *, trusted: bool = False) -> Explanation | None:
    """Repeat the case of a file; return None if nothing differs.

    Args:
        path: path of the file.
        observer: receives messages and progress.
        trusted: whether code that comes with the models may run.

    Raises:
        CheckError: as for `load`.
        EngineError: if the engine cannot be built.
    """
    config, pool, seed, case = load(path)
    config = replace(config, trust_remote_code=trusted)  # whatever the file says
    check_sources(config, observer)
    observer.message(f"replaying {path}: {case.setting}, {len(case.watched)} prompts")
    with Check(config, pool, {}, seed, observer, Subject(config, observer=observer)) as check:
        failure = check.attempt(case)
        return None if failure is None else explain(check, failure, seconds=0.0)


def _setting(record: dict[str, Any]) -> Setting:
    """Return a setting, all of whose values must be on their axes.

    Raises:
        ValueError: if one is not.
    """
    setting = Setting(**record)
    for axis in fields(setting):
        if (value := getattr(setting, axis.name)) not in axis.metadata["values"]:
            raise ValueError(f"there is no {TITLES[axis.name]} {value!r}")
    return setting


def _request(record: dict[str, Any]) -> Request:
    ids = record["token_ids"]
    request = Request(**{**record, "params": SamplingParams(**record["params"])})
    return replace(request, token_ids=None if ids is None else tuple(ids))
