"""The shipped model that thinks keeps its promises, and the script that made it runs."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.examples import thorough, usual
from transformers import AutoModelForCausalLM

from detgen import thinking
from detgen.errors import DEMO
from detgen.thinking.modeling import IGNORED

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import thinking_baselines  # noqa: E402
import thinking_training  # noqa: E402
import train_thinking_states  # noqa: E402
from demo_training import Budget  # noqa: E402
from thinking_tasks import COIN, HELD_OUT, Example, coin_flips, example_of, train_tokenizer, variables  # noqa: E402

FOLDER = DEMO / "thinking"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer()


@pytest.fixture(scope="module")
def demo() -> Any:
    thinking.register()
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def test_the_folder_keeps_its_limit() -> None:
    files = list(FOLDER.iterdir())
    assert {file.name for file in files} >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert sum(file.stat().st_size for file in files) <= 6_000_000


@pytest.mark.parametrize("kind", sorted(COIN.tests))
def test_the_demo_model_is_right(kind: str, demo: Any, tokenizer: Any) -> None:
    """A sample of what its README says: twice as many steps as in training, and in the thorough profile five times."""
    draw = random.Random(kind)
    stories = [COIN.tests[kind](draw, steps) for steps in usual((20,), (100,)) for _ in range(3)]
    scored = thinking_training.score(demo, [example_of(story, tokenizer, 4) for story in stories])
    assert (scored.answers, scored.thoughts) == (1.0, 1.0)


def test_the_demo_model_adds(demo: Any, tokenizer: Any) -> None:
    """Variables, at as many steps as in training and at twice as many."""
    draw = random.Random(1)
    stories = [variables(draw, steps) for steps in (1, 10, 20) for _ in range(20)]
    scored = thinking_training.score(demo, [example_of(story, tokenizer, 4) for story in stories])
    assert scored.answers >= 0.98
    assert scored.thoughts >= 0.99


@thorough
def test_reading_many_at_once_equals_reading_one(demo: Any, tokenizer: Any) -> None:
    draw = random.Random(0)
    stories = [coin_flips(draw, steps, HELD_OUT, 0.5) for steps in (3, 24, 11)]
    rows = [tokenizer.encode(story.text).ids for story in stories]
    assert max(map(len, rows)) > 4 * demo.config.backbone.sliding_window
    random_model = thinking_training.build_model("coin", initializer_range=0.3).eval()
    for model in (demo, random_model):
        for row, (said, thoughts) in zip(rows, thinking_training.read_many(model, rows), strict=True):
            reading = model.read(row)
            assert thoughts == reading.thoughts
            assert said == reading.logits.argmax(-1).tolist()


def test_a_score_counts_answers_and_thoughts(demo: Any, tokenizer: Any) -> None:
    draw = random.Random(1)
    right = [example_of(coin_flips(draw, 5), tokenizer, 4) for _ in range(4)]
    chunks = sum(len(example.prompt) // 4 for example in right)
    answers = {tokenizer.encode(" heads").ids[0]: " tails", tokenizer.encode(" tails").ids[0]: " heads"}
    wrong = [Example(e.prompt, [*tokenizer.encode(answers[e.answer[0]]).ids, 0], e.thoughts) for e in right[:1]]
    scored = thinking_training.score(demo, wrong + right[1:])
    assert (scored.answers, scored.thoughts) == (0.75, 1.0)
    dull = [Example(e.prompt, e.answer, [(9,)] * len(e.thoughts)) for e in right[:1]]
    scored = thinking_training.score(demo, dull + right[1:], at_once=3)
    assert scored.thoughts == pytest.approx(1 - (len(right[0].prompt) // 4) / chunks)
    assert str(thinking_training.Score(0.981, 0.99987)) == "98.1 / 99.99 %"


def test_a_batch_holds_each_example(tokenizer: Any) -> None:
    draw = random.Random(2)
    examples = [example_of(coin_flips(draw, steps), tokenizer, 4) for steps in (1, 9, 4)]
    batch = thinking_training.batch_of(examples, 4)
    assert batch.ids.shape[1] == 4 * batch.thoughts.shape[1]
    for row, example in enumerate(examples):
        learned = batch.labels[row] != IGNORED
        assert batch.labels[row][learned].tolist() == example.answer
        assert torch.equal(batch.labels[row][learned], batch.ids[row][learned])
        assert batch.ids[row, : len(example.prompt)].tolist() == example.prompt
        gold = [tuple(i for i in thought if i != IGNORED) for thought in batch.thoughts[row].tolist()]
        assert gold[: len(example.thoughts)] == [(*thought, 0) for thought in example.thoughts]
        assert not any(gold[len(example.thoughts) :])


def test_batches_have_as_many_stories_as_fit(tokenizer: Any) -> None:
    draw = random.Random(3)
    for _ in range(20):
        examples = thinking_training.examples_to_learn(COIN, draw, lambda story: example_of(story, tokenizer, 4))
        longest = max(len(e.prompt) + len(e.answer) for e in examples)
        assert longest * len(examples) <= 1024
        assert len(examples) <= 64


@thorough
def test_training_lowers_the_loss_and_reports(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_training, "REPORT", 10)
    monkeypatch.setattr(thinking_training, "REPORTED", 2)
    lines: list[str] = []
    model, trained = thinking_training.train("coin", tokenizer, Budget(steps=20), report=lines.append)
    assert trained.steps == 20
    assert not model.training
    assert [line.split(",")[0] for line in lines] == ["step 10", "step 20"]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert losses[1] < losses[0]
    assert "% at 20" in lines[0]
    assert "% at 40 steps" in lines[0]


@pytest.mark.parametrize("chain", [False, True])
def test_baselines_answer_alone_or_after_a_chain(chain: bool, tokenizer: Any) -> None:
    story = coin_flips(random.Random(4), 3)
    example = thinking_baselines.plain_example(story, tokenizer, chain=chain)
    said = tokenizer.decode(example.answer[:-1])
    assert said.endswith(story.answer)
    assert ("So:" in said) == chain
    assert said.count(";") == (len(story.events) if chain else 0)
    model: Any = thinking_baselines.train_baseline("coin", tokenizer, Budget(steps=2), chain=chain)
    assert model.config.sliding_window is None
    stories = [coin_flips(random.Random(seed), 3) for seed in range(4)]
    scored = thinking_baselines.baseline_score(model, stories, tokenizer, chain=chain)
    assert (scored.answers, scored.thoughts) == (0.0, None)


def test_a_baseline_is_right_if_what_it_says_ends_with_the_answer(tokenizer: Any) -> None:
    stories = [coin_flips(random.Random(seed), 3) for seed in range(4)]

    class Knowing:
        """Says the right chain after each prompt, but for the first story."""

        def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            said = [tokenizer.encode("perhaps").ids]
            for row, mask, story in zip(ids.tolist(), attention_mask.tolist(), stories, strict=True):
                shown = [token for token, there in zip(row, mask, strict=True) if there]
                assert tokenizer.decode(shown) == story.text
                said.append(thinking_baselines.plain_example(story, tokenizer, chain=True).answer)
            said = [said[0], *said[2:]]
            longest = max(map(len, said))
            return torch.cat([ids, torch.tensor([[*s, *[0] * (longest - len(s))] for s in said])], 1)

    assert thinking_baselines.baseline_score(Knowing(), stories, tokenizer, chain=True).answers == 0.75


@thorough
def test_the_script_writes_a_folder_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = ["--task", "coin", "--steps", "2", "--threads", "1", "--count", "2", "--baselines", "-o", str(tmp_path)]
    train_thinking_states.main(arguments)
    torch.set_num_threads(threads)
    shown, card = capsys.readouterr().out, (tmp_path / "README.md").read_text("utf-8")
    assert "| stories | steps | answers / thoughts | answer alone | chain of thought |" in shown
    assert all(f"| other sentences | {steps} |" in card for steps in (20, 40, 100))
    assert "`python tools/train_thinking_states.py --task coin --steps 2 --threads 1 --baselines`" in card
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert model.config.model_type == "thinking_states"
