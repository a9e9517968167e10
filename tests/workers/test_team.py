"""An engine of workers without Ray: every sample comes once and is the right one, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import examples
from helpers.fakes import FakeEngine, Watcher, complete, content, go, manifest_of, stopping_at
from helpers.workers import FATAL, FedEngine, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request
from detgen.errors import EngineError, RunError
from detgen.params import SamplingParams
from detgen.workers.team import WorkersEngine


@pytest.fixture(scope="module", autouse=True)
def _answers_with_little() -> Iterator[None]:
    """Workers answer as soon as anything has finished, so that requests are often half done when they die."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("detgen.workers.team._SECONDS", 0.0)
        patch.setattr("detgen.workers.team._SECONDS_PER_WORKER", 0.0)
        yield


def requests_of(shapes: list[tuple[int, int, bool]]) -> list[Request]:
    """A request for each of: samples, length of its prompt, whether it cannot run."""
    return [
        Request(i, i, prompt="too long" if bad else f"{'x' * size} {i}", params=SamplingParams(max_tokens=3, n=n))
        for i, (n, size, bad) in enumerate(shapes)
    ]


def run_all(engine: WorkersEngine, requests: list[Request]) -> dict[tuple[int, int], Completion]:
    found: dict[tuple[int, int], Completion] = {}
    for completions in engine.stream(requests):
        for each in completions:
            assert (each.request.index, each.sample) not in found, "a sample comes once"
            found[each.request.index, each.sample] = each
    return found


def wanted(requests: list[Request]) -> dict[tuple[int, int], Completion]:
    return {(each.request.index, each.sample): each for request in requests for each in complete(request)}


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 900), st.booleans()), max_size=40)


@examples(60)
@given(shapes, st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(1, 60), max_size=6), st.integers(0, 9))
def test_every_sample_comes_once_whoever_dies(
    shapes: list[tuple[int, int, bool]], number: int, batch: int, deaths: list[int], seed: int
) -> None:
    cluster = LocalCluster(number, batch_size=batch, seed=seed)
    cluster.before = lambda worker, count: cluster.kill(worker) if count in deaths else None
    requests = requests_of(shapes)
    engine = WorkersEngine(cluster, batch, Watcher())
    assert run_all(engine, requests) == wanted(requests)
    assert engine.stats.live == 0
    again = requests_of([*shapes, (1, 1, False)])
    assert run_all(engine, again) == wanted(again), "a second stream of the same workers"


def test_what_a_worker_still_generates_is_of_no_other_stream() -> None:
    """A sample that had come before its worker died comes again after the stream has ended, of another request then."""
    cluster = LocalCluster(1, batch_size=3, seed=0)
    cluster.before = lambda worker, count: cluster.kill(worker) if count == 3 else None
    engine = WorkersEngine(cluster, 3, Watcher())
    for shapes in ([(1, 22, False), (3, 0, False)], [(1, 22, False), (3, 7, False), (1, 1, False)]):
        requests = requests_of(shapes)
        assert run_all(engine, requests) == wanted(requests)


@examples(30)
@given(st.integers(1, 3), st.integers(0, 20), st.integers(0, 9))
def test_a_stream_left_early_leaves_nothing_behind(number: int, steps: int, seed: int) -> None:
    engine = WorkersEngine(LocalCluster(number, seed=seed), 4, Watcher())
    requests = requests_of([(2, 5, False)] * 30)
    stream: Any = engine.stream(requests)
    for _ in range(steps):
        next(stream, None)
    stream.close()
    assert run_all(engine, requests) == wanted(requests)


def test_a_run_has_the_bytes_of_a_single_process(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "one", build=FakeEngine)
    for number in (1, 3):
        cluster = LocalCluster(number)
        deaths = {2, 5, 6}
        cluster.before = lambda worker, count: cluster.kill(worker) if count in deaths else None  # noqa: B023
        watcher = Watcher()
        out = tmp_path / str(number)
        go(prompts, out, watcher, build=lambda config: WorkersEngine(cluster, 4, watcher))  # noqa: B023
        assert content(out) == content(tmp_path / "one")
        assert sum(cluster.started) > number
        assert [text for text in watcher.messages if "died; it is started again" in text]


def test_a_run_of_a_single_process_is_resumed_by_workers(tmp_path: Path, prompts: Path) -> None:
    go(prompts, tmp_path / "whole")
    go(prompts, tmp_path / "out", build=stopping_at(2))
    assert manifest_of(tmp_path / "out")["status"] == "interrupted"
    summary = go(prompts, tmp_path / "out", build=lambda config: WorkersEngine(LocalCluster(2), 4, Watcher()))
    assert summary.resumed > 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_no_more_is_read_than_is_needed_ahead() -> None:
    read = 0

    def requests() -> Any:
        nonlocal read
        for request in requests_of([(1, 1, False)] * 5000):
            read += 1
            yield request

    stream = WorkersEngine(LocalCluster(2), 4, Watcher()).stream(requests())
    done = 0
    for completions in stream:
        done += len(completions)
        assert read - done <= 1024 + 2 * 2 * 4
    assert done == read == 5000


def test_progress_shows_workers(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detgen.run.work._REPORT_SECONDS", 0.0)
    watcher, cluster = Watcher(), LocalCluster(2)
    cluster.before = lambda worker, count: cluster.kill(0) if count == 4 else None
    go(prompts, tmp_path / "out", watcher, build=lambda config: WorkersEngine(cluster, 4, watcher))
    figures = {figure for report in watcher.reports for figure in report.figures if "worker" in figure}
    assert figures == {"2 workers", "1 of 2 workers"}
    assert "2 workers" in watcher.reports[-1].figures
    go(prompts, tmp_path / "alone", watcher := Watcher())
    assert not [figure for report in watcher.reports for figure in report.figures if "worker" in figure]


def test_progress_counts_workers() -> None:
    cluster = LocalCluster(2)
    engine = WorkersEngine(cluster, 4, Watcher())
    assert (engine.stats.workers, engine.stats.ready) == (2, 2)
    seen: list[int] = []
    cluster.before = lambda worker, count: (seen.append(engine.stats.ready), cluster.kill(0) if count == 3 else None)[0]
    requests = requests_of([(1, 1, False)] * 60)
    run_all(engine, requests)
    assert engine.stats.tokens >= 3 * 60
    assert set(seen) == {1, 2}
    assert engine.stats.ready == 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_request_that_ends_its_workers_ends_the_run_by_name(number: int) -> None:
    requests = requests_of([(1, 1, False)] * 30)
    requests[17] = Request(17, "seventeen", prompt=FATAL, line=18)
    cluster = LocalCluster(number)
    engine = WorkersEngine(cluster, 4, Watcher())
    with pytest.raises(RunError, match=r"'seventeen' \(line 18\) ended 5 workers, 3 of which ran nothing else"):
        run_all(engine, requests)
    assert sum(cluster.started) == number + 5


def test_workers_that_die_with_the_same_requests_do_not_end_the_run() -> None:
    requests = requests_of([(1, 1, False)] * 12)
    cluster = LocalCluster(1)
    cluster.before = lambda worker, count: cluster.kill(worker) if count <= 2 else None
    assert run_all(WorkersEngine(cluster, 4, Watcher()), requests) == wanted(requests)


class Odd(FedEngine):
    """An engine with another type of numbers."""

    def profile(self) -> dict[str, Any]:
        return super().profile() | {"dtype": "bfloat16"}


class Renamed(FedEngine):
    """The same model, elsewhere."""

    def profile(self) -> dict[str, Any]:
        profile = super().profile()
        return profile | {"target": profile["target"] | {"name": "elsewhere"}}


def by_worker(*kinds: type[FedEngine]) -> Callable[[int], FedEngine]:
    return lambda worker: kinds[worker](EngineConfig(batch_size=4))


def test_a_worker_that_differs_is_refused_by_name() -> None:
    difference = "profile.dtype: float32 -> bfloat16"
    cluster = LocalCluster(3, by_worker(FedEngine, Renamed, Odd))
    with pytest.raises(EngineError, match=rf"^worker 3 on \S+ differs: {difference}\. Outputs could differ"):
        WorkersEngine(cluster, 4, Watcher())
    assert cluster.requests == [[], [], []]


def test_a_worker_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", "1.1"])
    monkeypatch.setattr("detgen.workers.serving.detgen.__version__", "1.0")

    def build(worker: int) -> FedEngine:
        monkeypatch.setattr("detgen.workers.serving.detgen.__version__", next(versions))
        return FedEngine(EngineConfig())

    with pytest.raises(EngineError, match=r"detgen: 1\.\d -> 1\.\d"):
        WorkersEngine(LocalCluster(2, build), 4, Watcher())


def test_a_worker_that_comes_back_different_gets_no_work() -> None:
    built: list[int] = []

    def build(worker: int) -> FedEngine:
        built.append(worker)
        return (Odd if built.count(worker) > 1 else FedEngine)(EngineConfig(batch_size=4))

    cluster, watcher = LocalCluster(2, build), Watcher()
    engine = WorkersEngine(cluster, 4, watcher)
    cluster.before = lambda worker, count: cluster.kill(1) if count == 2 else None
    requests = requests_of([(1, 1, False)] * 50)
    assert run_all(engine, requests) == wanted(requests)
    assert any(
        "worker 2" in text and "dtype: float32 -> bfloat16; the run goes on" in text for text in watcher.messages
    )
    assert engine.stats.ready == 1
    given = len(cluster.requests[1])
    cluster.before = lambda worker, count: cluster.kill(0)
    with pytest.raises(EngineError, match=r"no worker is left: worker 1 .* differs"):
        run_all(engine, requests)
    assert len(cluster.requests[1]) == given


def test_errors_of_the_model_are_those_of_a_single_process() -> None:
    def missing(worker: int) -> FedEngine:
        raise EngineError("there is no model 'nowhere'")

    with pytest.raises(EngineError, match=r"^there is no model 'nowhere'$"):
        WorkersEngine(LocalCluster(2, missing), 4, Watcher())

    class Failing(FedEngine):
        def stream(self, requests: Any) -> Any:
            next(requests)
            raise MemoryError("no memory for it")
            yield

    engine = WorkersEngine(LocalCluster(2, lambda worker: Failing(EngineConfig())), 4, Watcher())
    with pytest.raises(MemoryError, match="no memory for it"):
        run_all(engine, requests_of([(1, 1, False)]))


def test_a_worker_that_dies_whenever_it_loads_ends_the_start() -> None:
    from helpers.workers import Crash

    def build(worker: int) -> FedEngine:
        if worker == 1:
            raise Crash
        return FedEngine(EngineConfig())

    with pytest.raises(
        EngineError, match="worker 2 died 3 times while it loaded the model, as processes do when memory"
    ):
        WorkersEngine(LocalCluster(2, build), 4, Watcher())
