"""The file that replays a difference: all that it takes but the models themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from detgen.determinism import CheckError
from detgen.determinism.axes import Setting
from detgen.determinism.checking import Case, Check, Observer
from detgen.determinism.explaining import Finding, explain
from detgen.determinism.prompts import Pool
from detgen.determinism.running import Subject
from detgen.engine.config import EngineConfig
from detgen.engine.request import Request, SamplingParams

_CONFIG = ("target", "draft", "device", "dtype", "target_quant", "draft_quant", "threads", "kv_memory", "batch_size")


def save(path: Path, finding: Finding, config: EngineConfig, pool: Pool, seed: int, profile: dict[str, Any]) -> None:
    """Write what replays a finding.

    Raises:
        OSError: if the file cannot be written.
    """
    case = finding.case
    content = {
        "detgen": "verify-determinism",
        "config": {name: getattr(config, name) for name in _CONFIG},
        "profile": profile,
        "seed": seed,
        "setting": asdict(case.setting),
        "long": pool.long,
        "requests": [asdict(r) for r in case.watched],
        "found": finding.as_dict(),
    }
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[EngineConfig, Pool, int, Case]:
    """What a file replays: how to build the engine, the prompts, the seed, and the case.

    Raises:
        CheckError: if it is no such file.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["detgen"] != "verify-determinism":
            raise CheckError(f"{path} is no reproduction file of detgen verify-determinism")
        watched = [_request(r) for r in content["requests"]]
        case = Case(Setting(**content["setting"]), watched)
        config = EngineConfig(**content["config"])
        return config, Pool(watched, content["long"]), int(content["seed"]), case
    except OSError as error:
        raise CheckError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckError(f"{path} is no reproduction file of detgen verify-determinism: {error}") from None


def again(path: Path, observer: Observer) -> Finding | None:
    """Try what a file holds once more; None if nothing differs.

    Raises:
        CheckError: if it is no such file.
        EngineError: if the engine cannot be built.
    """
    config, pool, seed, case = load(path)
    observer.message(f"replaying {path}: {case.setting}, {len(case.watched)} prompts")
    with Check(config, pool, [], seed, observer, Subject(config)) as check:
        failure = check.attempt(case)
        return None if failure is None else explain(check, failure, 0.0)


def _request(record: dict[str, Any]) -> Request:
    params = {**record["params"], "stop": tuple(record["params"]["stop"])}
    ids = record["token_ids"]
    request = Request(**{**record, "params": SamplingParams(**params)})
    return replace(request, token_ids=None if ids is None else tuple(ids))
