import pytest

from rise_rl.config import Config, ConfigError, dump_config, load_config
from rise_rl.config_docs import PAGE, page

MINIMAL = "name: try\nmodel: smollm2-135m\nsteps: 3\ndata:\n  train: train.jsonl\n"


@pytest.fixture
def config_file(tmp_path):
    def write(text=MINIMAL):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_paper_defaults(config_file):
    config = load_config(config_file())
    assert (config.grpo.prompts_per_step, config.grpo.group_size, config.guidance.rollouts) == (64, 8, 8)
    assert (config.grpo.clip_low, config.grpo.clip_high, config.grpo.aggregation) == (0.2, 0.28, "token-mean")
    assert (config.guidance.gamma, config.guidance.criteria, config.guidance.budget_tokens) == (0.1, 5, 1024)
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (4096, 8192)
    assert (config.engine.lr, config.engine.warmup_steps, config.engine.weight_decay) == (1e-6, 10, 0.1)
    assert len(config.guidance.templates) == 5


def test_overrides_and_round_trip(config_file, tmp_path):
    config = load_config(config_file(), ["guidance.remove_at=30", "engine.lr=2e-5", "data.overlong_prompt=drop"])
    assert (config.guidance.remove_at, config.engine.lr, config.data.overlong_prompt) == (30, 2e-5, "drop")
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    "override, message",
    [
        ("guidance.gama=0.2", r"guidance\.gama: unknown key; did you mean 'gamma'\?"),
        ("stesp=4", r"stesp: unknown key; did you mean 'steps'\?"),
        ("engine.offload.optimiser=true", r"engine\.offload\.optimiser: unknown key; did you mean 'optimizer'\?"),
        ("data.zzz=1", r"data\.zzz: unknown key; valid keys here: .*train"),
        ("grpo.group_size=1", r"grpo\.group_size: .*greater than or equal to 2.*found 1"),
        ("guidance.gamma=0", r"guidance\.gamma: .*greater than 0"),
        ("rollout.top_p=0.9", r"rollout: top_p < 1 or top_k > 0 .* training needs top_p 1"),
        ("rollout.temperature=0", r"rollout\.temperature: .*greater than or equal to 0.01"),
        ("guidance.templates=[no slot]", r"guidance\.templates: .*\{hint\} exactly once, found 'no slot'"),
        ("guidance={coupled: true, drop_truncated: true}", r"guidance: drop_truncated .* no filter"),
        ("grpo.overlong_buffer=9000", r"grpo\.overlong_buffer \(9000\) is longer than rollout\.max_new_tokens"),
        ("steps", r"override 'steps': expected key=value"),
        (
            "judge.base_urls=[localhost:8000]",
            r"judge\.base_urls: expected addresses that begin with http://.*'localhost:8000'",
        ),
        ("judge.base_urls=['http://']", r"judge\.base_urls: expected addresses"),
        ("guidance.criteria=0", r"  guidance\.criteria: .*equal to 1, or 'all' \(found 0\)$"),
        (
            "guidance.remove_at=later",
            r"  guidance\.remove_at: Input should be 'never' or 'plateau', or .*integer.*'later'\)$",
        ),
        ("guidance=5", r"  guidance: Input should be keys and values \(found 5\)$"),
        ("judge=yes", r"  judge: Input should be keys and values \(found True\)$"),
        ("engine.zero_stage=7", r"  engine\.zero_stage: Input should be 0, 1, 2 or 3 \(found 7\)$"),
        ("rollout.top_k=5", r"subset_sampling: true to have it so$"),
        ("engine.lora={rnk: 1}", r"  engine\.lora\.rnk: unknown key; did you mean 'rank'\?$"),
        ("grpo={group_size: 1, clip_low: 2}", r"  grpo\.group_size: .*\(found 1\)\n  grpo\.clip_low: .*\(found 2\)$"),
        ("engine.betas=[0.9,1.5]", r"  engine\.betas\.1: Input should be less than 1 \(found 1\.5\)$"),
        *(
            (f"{key}=.inf", rf"{key}: Input should be a finite number")
            for key in (
                *("engine.lr", "rollout.temperature", "guidance.plateau.tolerance", "judge.timeout_s"),
                *("engine.timeout_minutes", "guidance.gain_max"),
            )
        ),
        *((f"name={name}", "name: String should match") for name in (".", "..", ".hidden", "a/b")),
    ],
)
def test_mistakes_name_the_key_and_what_was_expected(config_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file(), [override])


def test_missing_files_and_keys(config_file, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such configuration file"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"steps: Field required"):
        load_config(config_file(MINIMAL.replace("steps: 3\n", "")))
    with pytest.raises(ConfigError, match="not a readable configuration"):
        load_config(config_file("name: [unclosed\n"))


def test_every_key_is_documented():
    def undocumented(model, prefix=""):
        for name, field in model.model_fields.items():
            inner = next(
                (
                    o
                    for o in [field.annotation, *getattr(field.annotation, "__args__", ())]
                    if hasattr(o, "model_fields")
                ),
                None,
            )
            if inner:
                yield from undocumented(inner, f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undocumented(Config)) == []


def test_defaults_on_the_configuration_page_are_what_one_would_write_in_the_file():
    kinds = {"`trackers`": "`[tensorboard]`", "`engine.betas`": "`[0.9, 0.999]`", "`grpo.mask_truncated`": "`false`"}
    kinds |= {"`judge.cache_dir`": "`null`", "`engine.dtype`": "`auto`", "`data.chat_template`": "`{}`"}
    cells = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[2] for row in page().splitlines() if " | " in row}
    assert {key: cells[key] for key in kinds} == kinds


def test_the_configuration_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m rise_rl.config_docs"
