from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import log_softmax
from trl import GRPOTrainer

from rise_rl.integrations.trl import RiseGRPOMixin, RiseGRPOTrainer
from tests.integrations.grpo import logged, losses, make_trainer, weights

REUSED = {"num_iterations": 2}
PLAIN_KL = {"use_bias_correction_kl": False}
pytestmark = pytest.mark.slow

CASES = {
    "dapo, one update a batch": ("qwen3-tied", {}),
    "grpo, KL, accumulation": ("qwen3", {"loss_type": "grpo", "beta": 0.1, "gradient_accumulation_steps": 2}),
    "grpo, two updates a batch": ("llama", {"loss_type": "grpo", "beta": 0.1, "epsilon_high": 0.28, **REUSED}),
    "bnpo, temperature": ("qwen3", {"loss_type": "bnpo", "temperature": 0.7, "steps_per_generation": 2, **REUSED}),
    "dr_grpo, delta": ("qwen3-tied", {"loss_type": "dr_grpo", "delta": 1.021, "epsilon": 0.02, **REUSED}),
    "dapo, high entropy": (
        "qwen3",
        {"top_entropy_quantile": 0.4, "beta": 0.05, "steps_per_generation": 2, **REUSED, **PLAIN_KL},
    ),
    "cispo, capped": ("qwen3-tied", {"loss_type": "cispo", "epsilon_high": 0.98, "beta": 0.05, **REUSED, **PLAIN_KL}),
    "cispo, once": ("llama", {"loss_type": "cispo", "epsilon_high": 0.7, "gradient_accumulation_steps": 2}),
    "luspo by token": ("qwen3", {"loss_type": "luspo", **REUSED}),
}


def with_ties(cls):
    """The first tokens of a group's answers have one context and one entropy, and rounding would say which of them pass
    the threshold: with entropies to 4 digits, both backends see the ties.
    """

    class Rounded(cls):
        def get_high_entropy_mask(self, entropies, mask, threshold):
            return super().get_high_entropy_mask((entropies * 1e4).round(), mask, threshold)

    return Rounded


def trained(cls, folder, output, options):
    """The trainer after its five steps, and its weights before them. Its seed is set when it is made."""
    trainer = make_trainer(with_ties(cls), folder, output, **options)
    start = weights(trainer)
    trainer.train()
    return trainer, start


@pytest.mark.parametrize("kind, options", CASES.values(), ids=CASES)
def test_five_steps_of_training_are_trls(folders, tmp_path, kind, options):
    own, start = trained(GRPOTrainer, folders[kind], tmp_path, options)
    rise, same = trained(RiseGRPOTrainer, folders[kind], tmp_path, options)
    assert torch.equal(start, same)
    assert losses(rise) == pytest.approx(losses(own), rel=1e-4, abs=2e-6)
    for ours, theirs in zip(logged(rise), logged(own), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=2e-6)
    moved = (weights(own) - start).abs().max()
    # Adam divides by the gradient's size: where that is near 0, rounding decides a part of the step.
    assert (weights(rise) - weights(own)).norm() < 2e-3 * (weights(own) - start).norm()
    assert moved > 1e-4


def test_bfloat16_autocast(folders, tmp_path):
    """TRL's default on a GPU. Its logits are rounded to bfloat16 (1 part in 256), ours are not."""
    options = {"bf16": True, "max_steps": 1, "beta": 0.1}
    own, _ = trained(GRPOTrainer, folders["qwen3"], tmp_path, options)
    rise, _ = trained(RiseGRPOTrainer, folders["qwen3"], tmp_path, options)
    ours, theirs = logged(rise)[0], logged(own)[0]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=4e-3)


def test_a_batch_of_truncated_answers_alone_moves_nothing(folders, tmp_path):
    options = {"mask_truncated_completions": True, "max_completion_length": 3, "weight_decay": 0.0}
    trainer, start = trained(RiseGRPOTrainer, folders["qwen3"], tmp_path, options)
    assert losses(trainer) == [0.0] * 5
    assert torch.equal(weights(trainer), start)


def stepped(trainer):
    """A trainer in the middle of training, and one micro-batch of its own that was sampled some updates ago."""
    trainer.train()
    trainer.model.train()
    inputs = next(x for x in trainer._buffered_inputs)
    trainer.current_gradient_accumulation_steps = 2
    return inputs


def loss_and_gradients(trainer, inputs):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def with_vllm_ratios(inputs):
    """What TRL adds for its vLLM correction, by token or (a column) by sequence, and masks of tool outputs."""
    generator = torch.Generator().manual_seed(0)
    by_token = torch.rand(inputs["completion_ids"].shape, generator=generator) * 2
    tool_mask = (torch.rand(by_token.shape, generator=generator) > 0.3).long()
    # A tool's tokens may be anything to the policy.
    wild = {
        "old_per_token_logps": torch.where(tool_mask.bool(), inputs["old_per_token_logps"], -150.0),
        "ref_per_token_logps": torch.where(tool_mask.bool(), inputs["ref_per_token_logps"], -120.0),
    }
    return [
        {**inputs, "importance_sampling_ratio": by_token},
        {**inputs, "importance_sampling_ratio": by_token[:, :1]},
        {**inputs, "importance_sampling_ratio": by_token, "tool_mask": tool_mask},
        {**inputs, **wild, "importance_sampling_ratio": by_token, "tool_mask": tool_mask},
    ]


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_vllm_correction_and_tool_masks(folders, tmp_path, loss_type):
    """TRL's vLLM needs a GPU; its loss only sees the ratios."""
    options = {"loss_type": loss_type, "beta": 0.1, "epsilon_high": 0.3, **REUSED, "max_steps": 2}
    options |= PLAIN_KL if loss_type == "cispo" else {}
    own, rise = (make_trainer(c, folders["qwen3"], tmp_path, **options) for c in (GRPOTrainer, RiseGRPOTrainer))
    inputs = stepped(own)
    rise.model.load_state_dict(own.model.state_dict())
    stepped(rise)
    rise.model.load_state_dict(own.model.state_dict())
    *cases, wild = with_vllm_ratios(inputs)
    for trainer in (own, rise):
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    for case in cases:
        theirs, ours = loss_and_gradients(own, case), loss_and_gradients(rise, case)
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5, abs=1e-7)
        assert (ours[1] - theirs[1]).norm() < 1e-5 * theirs[1].norm()
    tame = loss_and_gradients(rise, cases[-1])
    assert loss_and_gradients(rise, wild)[0] == pytest.approx(tame[0], rel=1e-6)


def test_lora_trains_as_with_trl_and_is_refused_on_the_head(folders, tmp_path):
    from peft import LoraConfig

    options = {"beta": 0.1, "loss_type": "grpo", "gradient_accumulation_steps": 2}

    def lora(cls, targets=("q_proj", "v_proj")):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")
        trainer = make_trainer(cls, folders["qwen3"], tmp_path, peft_config=config, **options)
        trainer.train()
        return trainer

    own, rise = lora(GRPOTrainer), lora(RiseGRPOTrainer)
    assert losses(rise) == pytest.approx(losses(own), rel=1e-4, abs=2e-6)
    assert torch.allclose(weights(rise), weights(own), atol=2e-5)
    assert any(abs(loss) > 1e-5 for loss in losses(own))
    with pytest.raises(ValueError, match="lm_head"):
        lora(RiseGRPOTrainer, ("q_proj", "lm_head"))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "importance_sampling_level='sequence'"),
        ({"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"entropy_coef": 0.01}, "entropy_coef"),
        ({"beta": 0.1, "num_iterations": 2, "loss_type": "cispo"}, "use_bias_correction_kl with loss_type='cispo'"),
        ({"delta": 1.1, "epsilon_high": 0.2}, "delta=1.1"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_needs_more_than_a_tokens_log_prob_is_refused(folders, tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        make_trainer(RiseGRPOTrainer, folders["qwen3"], tmp_path, **options)


def test_another_loss_underneath_is_an_error(folders, tmp_path):
    class Squared(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * 1.01

    class Mine(RiseGRPOMixin, Squared):
        pass

    with pytest.raises(RuntimeError, match="derivative of TRL's loss"):
        make_trainer(Mine, folders["qwen3"], tmp_path).train()


def test_log_probs_for_reference_and_old_policy_are_the_models(folders, tmp_path):
    trainer = make_trainer(RiseGRPOTrainer, folders["qwen3"], tmp_path, beta=0.1, temperature=0.6)
    ids = torch.arange(5, 35).view(2, 15)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for model in (trainer.model, trainer.ref_model):
        with torch.no_grad():
            found, entropy, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 9, compute_entropy=True)
            z = log_softmax(model(input_ids=ids, attention_mask=mask).logits.double()[:, 5:-1] / 0.6, -1)
        assert torch.allclose(found.double(), z.gather(-1, ids[:, 6:, None])[..., 0], atol=1e-5)
        assert torch.allclose(entropy.double(), -(z.exp() * z).sum(-1), atol=1e-5)


def test_evaluation_and_generation_still_work(folders, tmp_path):
    trainer = make_trainer(RiseGRPOTrainer, folders["qwen3"], tmp_path)
    trainer.model.eval()
    batch = [{"prompt": "Write"}] * 4
    loss, *_ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
    assert torch.isfinite(loss)


def test_the_import_needs_no_deepspeed_and_no_trainer_of_ours():
    code = (
        "import sys; sys.modules['deepspeed'] = None; import rise_rl.integrations.trl; "
        "print([m for m in sys.modules if m.startswith(('rise_engine', 'rise_rl.trainer', 'rise_rl.config'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
