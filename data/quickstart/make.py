"""Writes train.jsonl and heldout.jsonl beside this file from topics.yaml: `python data/quickstart/make.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SPLITS = ("train", "heldout")


def rows(topics: dict[str, Any], split: str) -> list[dict[str, Any]]:
    """One row in RubricHub's format per prompt; topics take turns, so that any first n rows hold all of them."""
    size = max(len(topic[split]) for topic in topics.values())
    turns = [(name, k) for k in range(size) for name, topic in topics.items() if k < len(topic[split])]
    return [
        {
            "prompt": [{"role": "user", "content": topics[name][split][k]}],
            "data_source": "rise_quickstart",
            "ability": name,
            "reward_model": {"style": "rubric", "ground_truth": "", "rubrics": rubrics(topics[name]["criteria"])},
            "extra_info": {"id": f"{name}-{split}-{k:02d}", "index": index},
        }
        for index, (name, k) in enumerate(turns)
    ]


def rubrics(criteria: list[list[Any]]) -> list[dict[str, Any]]:
    return [
        {
            "criterion": text,
            "points": points,
            "tags": {"verifier": "rule", "function": function, "parameters": parameters},
        }
        for text, points, function, parameters in criteria
    ]


def render(split: str) -> str:
    topics = yaml.safe_load((HERE / "topics.yaml").read_text(encoding="utf-8"))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(topics, split))


if __name__ == "__main__":
    for name in SPLITS:
        (HERE / f"{name}.jsonl").write_text(render(name), encoding="utf-8")
