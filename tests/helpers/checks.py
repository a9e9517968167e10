"""What the tests of the check share: an engine, a few prompts, and a check that ends at the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from detgen import Engine, EngineConfig
from detgen.drafters.registry import DRAFTERS
from detgen.engine.request import Request
from detgen.errors import DEMO
from detgen.progress import Progress
from detgen.prompts import open_prompts
from detgen.verify.perturb.axes import Axes, Setting, make_axes
from detgen.verify.perturb.checking import Check
from detgen.verify.perturb.pool import Pool
from detgen.verify.perturb.prompts import Extent, read_pool
from detgen.verify.perturb.result import Failure
from detgen.verify.perturb.running import Subject


class Silent:
    """An observer that keeps nothing."""

    def message(self, text: str) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def progress(self, progress: Progress) -> None:
        pass


def first_failure(check: Check, settings: Iterable[Setting]) -> Failure:
    """What a check finds under the first of some settings that differs; one must."""
    check.learn()
    for setting in settings:
        if failures := check.run([setting]).failures:
            return failures[0]
    pytest.fail("no setting differs")


def sweep(engine: Engine) -> None:
    """Forget what a fault left in the cache that a sound engine would not, pages that two may take, and all states."""
    cache = engine.canonical.cache
    cache.pages.lay_out(0, 0)
    for entries in (*cache.keys, *cache.values):
        entries[...] = np.nan_to_num(entries)
    if cache.states is not None:
        cache.states.at.fill(0)
        for layer in cache.states.layers:
            for kept in layer or ():
                kept.fill(0)


@pytest.fixture
def observer() -> Silent:
    return Silent()


@pytest.fixture(scope="session")
def prompts() -> list[Request]:
    """Eight of the embedded prompts."""
    from detgen import SamplingParams

    found = [r for r in open_prompts(str(DEMO / "prompts.jsonl")).read(SamplingParams(), 8) if isinstance(r, Request)]
    assert len(found) == 8
    return found


@pytest.fixture
def pool() -> Pool:
    """Five of those prompts, cut short, with few tokens each."""
    return read_pool(None, None, None, Extent(5, ((1, 12), (2, 6), (1, 4)), longest=200, cut=60, random=0))


@pytest.fixture(scope="session")
def config() -> EngineConfig:
    return EngineConfig(batch_size=16, kv_memory=64 << 20)


@pytest.fixture(scope="session")
def engine(config: EngineConfig) -> Engine:
    return Engine(config)


@pytest.fixture(scope="session")
def axes() -> Axes:
    """All axes but those that need another process or another model."""
    return make_axes(drafters=DRAFTERS, quants=["none"], processes=False, cores=2)


@pytest.fixture
def make_check(config: EngineConfig, engine: Engine, axes: Axes) -> Callable[..., Check]:
    """A check on the shared engine."""

    def make(pool: Pool, **changes: Any) -> Check:
        subject = Subject(config, engine)
        arguments: dict[str, Any] = {"axes": axes, "seed": 0, "observer": Silent(), "subject": subject, **changes}
        return Check(config, pool, **arguments)

    return make
