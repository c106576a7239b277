from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Trainer,
    TrainingArguments,
)

from rise_kernels import linear_guide_loss, linear_logprob
from rise_rl.integrations.transformers import apply_rise_head, remove_rise_head
from tests.tiny import tiny_model

VOCABULARY = 387


def gemma(**changes):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=2.0,
        **changes,
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # logits far into the softcap's bend
    return model


MODELS = {
    "llama": lambda: tiny_model("llama", VOCABULARY, scale=4.0),
    "llama-tied": lambda: tiny_model("llama-tied", VOCABULARY, scale=4.0),
    "qwen3": lambda: tiny_model("qwen3", VOCABULARY, scale=4.0),
    "qwen3-tied": lambda: tiny_model("qwen3-tied", VOCABULARY, scale=4.0),
    "gemma3-tied": gemma,
    "gemma3": lambda: gemma(tie_word_embeddings=False),
}


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (3, 19), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("items", [None, 55, torch.tensor(55)], ids=["mean", "items", "items in a tensor"])
def test_the_loss_is_the_models_own(kind, items):
    model, inputs = MODELS[kind](), batch()
    given = {} if items is None else {"num_items_in_batch": items}
    own, gradients = loss_and_gradients(model, **inputs, **given)
    apply_rise_head(model)
    rise, found = loss_and_gradients(model, **inputs, **given)
    assert rise.loss.item() == pytest.approx(own.loss.item(), rel=2e-6)
    assert "logits" not in rise
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 2e-5 * gradient.norm(), name


def test_shifted_labels_are_taken_as_they_are():
    model, inputs = MODELS["qwen3"](), batch()
    labels = inputs.pop("labels")
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    own = model(**inputs, labels=labels, shift_labels=shifted).loss.item()
    apply_rise_head(model)
    output = model(**inputs, shift_labels=shifted)
    assert output.loss.item() == pytest.approx(own, rel=1e-6)
    assert output.log_probs.shape == shifted.shape


@pytest.mark.parametrize("kind", ["llama-tied", "gemma3"])
def test_log_probs_and_any_function_of_the_kernels(kind):
    model, inputs = MODELS[kind](), batch()
    target, kept = inputs["labels"][:, 1:], inputs["labels"][:, 1:] != -100
    logits = model(inputs["input_ids"], inputs["attention_mask"]).logits.double()[:, :-1] / 0.7
    expected = log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * kept
    apply_rise_head(model)

    output = model(**inputs, rise=partial(linear_logprob, temperature=0.7))
    assert output.loss is None
    assert output.log_probs.shape == target.shape
    assert torch.allclose(output.log_probs.double(), expected, atol=1e-5)
    assert output.log_probs.requires_grad

    token_weight = torch.rand(target.numel(), generator=torch.Generator().manual_seed(2))
    guide = partial(linear_guide_loss, token_weight=token_weight, gamma=0.3, temperature=0.7)
    output, found = loss_and_gradients(model, **inputs, rise=guide)
    remove_rise_head(model)
    model.zero_grad()
    logits = model(inputs["input_ids"], inputs["attention_mask"]).logits.double()[:, :-1] / 0.7
    p = log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None])[..., 0].exp()
    loss = -(token_weight.view_as(p) * kept * (p / (p + 0.3)).log()).sum()
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, p in model.named_parameters():
        assert (found[name] - p.grad).norm() < 2e-5 * p.grad.norm(), name


def test_logits_generation_and_saving_are_untouched_and_it_can_be_undone(tmp_path):
    model, inputs = MODELS["qwen3-tied"](), batch()
    labels = inputs.pop("labels")
    names, attributes = list(model.state_dict()), set(vars(model))
    logits = model(**inputs).logits
    answers = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    apply_rise_head(model)
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), answers)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(**inputs).logits, logits)
    with pytest.raises(ValueError, match="already"):
        apply_rise_head(model)
    remove_rise_head(model)
    assert set(vars(model)) == attributes
    assert "forward" not in vars(model.lm_head)
    assert model(**inputs, labels=labels).logits.shape[-1] == VOCABULARY
    with pytest.raises(ValueError, match="not called"):
        remove_rise_head(model)


def test_a_forward_of_someone_elses_is_called_and_restored():
    model, inputs = MODELS["llama"](), batch()
    own, seen = model.forward, []

    def theirs(*args, **kwargs):
        seen.append("labels" in kwargs)
        return own(*args, **kwargs)

    model.forward = theirs
    apply_rise_head(model)
    seen.clear()
    model(inputs["input_ids"])
    model(**inputs)
    assert seen == [False]  # with labels, the head answers
    remove_rise_head(model)
    assert model.forward is theirs


def test_a_copy_computes_with_its_own_weights():
    model, inputs = MODELS["qwen3"](), batch()
    before = apply_rise_head(model)(**inputs).loss
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert model(**inputs).loss == before
    remove_rise_head(model)
    assert other(**inputs).loss != before
    assert "logits" not in other(**inputs)


def test_a_frozen_head_gets_no_gradient_and_a_batch_without_labels_a_loss_of_0():
    model, inputs = MODELS["qwen3"](), batch()
    apply_rise_head(model)
    model.lm_head.weight.requires_grad_(False)
    model(**inputs).loss.backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    empty = model(**inputs | {"labels": torch.full_like(inputs["labels"], -100)}).loss
    assert empty.item() == 0
    empty.backward()


def test_autocast_and_gradient_checkpointing():
    model, inputs = MODELS["llama"](), batch()
    model.gradient_checkpointing_enable()
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        own, gradients = loss_and_gradients(model, **inputs)
        apply_rise_head(model)
        rise, found = loss_and_gradients(model, **inputs)
    assert rise.loss.item() == pytest.approx(own.loss.item(), rel=4e-3)
    whole = torch.cat([g.flatten() for g in gradients.values()])
    assert (torch.cat([g.flatten() for g in found.values()]) - whole).norm() < 3e-2 * whole.norm()


def scaled(config, cls, **changes):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return cls(config(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **shape, **changes))


def test_what_would_give_wrong_losses_is_refused():
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match="GraniteForCausalLM changes the logits"):
        apply_rise_head(scaled(GraniteConfig, GraniteForCausalLM, logits_scaling=8.0))
    with pytest.raises(ValueError, match="CohereForCausalLM changes the logits"):
        apply_rise_head(scaled(CohereConfig, CohereForCausalLM, logit_scale=0.0625))
    with torch.device("meta"):
        empty = MODELS["qwen3"]()
    with pytest.raises(ValueError, match="not here"):
        apply_rise_head(empty)
    own_loss = MODELS["qwen3"]()
    own_loss.loss_function = lambda **_: 0
    with pytest.raises(ValueError, match="expected the loss ForCausalLMLoss"):
        apply_rise_head(own_loss)

    on_head = LoraConfig(target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match=r"expected a plain nn\.Linear"):
        apply_rise_head(get_peft_model(MODELS["qwen3"](), on_head))
    model = apply_rise_head(MODELS["qwen3"]())
    adapted = get_peft_model(model, on_head)
    with pytest.raises(ValueError, match="replaced since"):
        adapted(**batch())

    model = apply_rise_head(MODELS["llama"]())
    with pytest.raises(ValueError, match="expected labels"):
        model(batch()["input_ids"], rise=linear_logprob)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(**batch(), logits_to_keep=3)


def test_lora_off_the_head():
    from peft import LoraConfig, get_peft_model

    found = []
    for rise in (False, True):
        torch.manual_seed(0)
        model = MODELS["qwen3"]()
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        if rise:
            apply_rise_head(adapted)
        loss = adapted(**batch()).loss
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in adapted.parameters() if p.requires_grad])))
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-6)
    assert (found[1][1] - found[0][1]).norm() < 1e-5 * found[0][1].norm()


@pytest.mark.parametrize("kind", ["qwen3-tied", "gemma3"])
def test_sft_under_the_trainer(kind, tmp_path):
    """Rows of unequal length and accumulation: the loss is normalised over the whole optimizer step by the Trainer."""
    inputs = batch()
    rows = [{key: x[i].tolist() for key, x in inputs.items()} for i in range(3)] * 4

    def trained(rise: bool):
        model = MODELS[kind]()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            apply_rise_head(model) if rise else model, arguments, train_dataset=rows, eval_dataset=rows[:3]
        )
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return [*losses, trainer.evaluate()["eval_loss"]], torch.cat([p.detach().flatten() for p in model.parameters()])

    start = torch.cat([p.detach().flatten() for p in MODELS[kind]().parameters()])
    (own, weights), (rise, found) = trained(False), trained(True)
    assert rise == pytest.approx(own, rel=1e-5)
    assert (found - weights).norm() < 2e-3 * (weights - start).norm()
