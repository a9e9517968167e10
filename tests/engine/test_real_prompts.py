"""On real prompts: the texts of transformers' `generate`, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.engine_inputs import code
from transformers import AutoModelForCausalLM

from detgen import Engine, Request, SamplingParams


def test_equals_generate(observe: Callable[..., Any], engines: Callable[..., Engine], demo_models: Any) -> None:
    """Greedy completions of real prompts are those of transformers' float32 `generate`, near-ties aside."""
    engine = engines(drafter="auto", batch_size=3)
    some = [Request(i, i, prompt=p, params=SamplingParams(max_tokens=24)) for i, p in enumerate(code(8))]
    found = observe(engine, some)
    model = AutoModelForCausalLM.from_pretrained(demo_models.target, dtype=torch.float32).eval()
    same = 0
    for request in some:
        one = found[request.id, 0]
        prompt = torch.tensor([engine.encode(request)])
        own = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=24,
            output_logits=True,
            return_dict_in_generate=True,
        )
        theirs = own.sequences[0, prompt.shape[1] :].tolist()
        if theirs == list(one.completion.token_ids):
            same += 1
            assert one.completion.text == engine.tokenizer.decode(theirs, skip_special_tokens=True)
            continue
        at = next(i for i, (a, b) in enumerate(zip(one.completion.token_ids, theirs, strict=False)) if a != b)
        top = own.logits[at][0].float().topk(2).values
        assert top[0] - top[1] < 1e-4, f"prompt {request.id} differs at token {at}"
    assert same >= 6


def test_drafts_save_passes(engines: Callable[..., Engine]) -> None:
    """The embedded draft model is worth having: on code, many of its tokens are accepted and save a pass."""
    engine = engines(drafter="model", draft_tokens=3).with_settings(batch_size=1)  # nothing counted yet
    done = engine.generate(code(6), max_tokens=32)
    assert (engine.stats.drafters["model"].acceptance or 0) > 0.3
    assert engine.stats.target_passes < 0.7 * sum(len(c.token_ids) for c in done)
