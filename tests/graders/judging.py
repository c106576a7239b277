"""Items for a judge, what it ought to say of them, and a grader that asks the fake one."""

from rise_rl.graders.base import GradeItem
from rise_rl.graders.llm import JudgeConfig, LlmGrader
from rise_rl.rubric import Criterion
from tests.graders.fake_server import score, truth

BANDS = {"bands": {"1-2": "poor", "9-10": "superb"}}
CHAT = [{"role": "user", "content": "Write about tea."}]


def item(name="q", response="Tea is a drink.", criteria=None):
    return GradeItem(
        name, CHAT, response, [Criterion(f"fact {name} {k}", 1.0) for k in range(4)] if criteria is None else criteria
    )


def right(graded):
    return [(score(c.text) - 1) / 9 if "bands" in c.tags else float(truth(c.text)) for c in graded.criteria]


def grader_for(*servers, **options):
    return LlmGrader(JudgeConfig(base_urls=tuple(s.url for s in servers), **{"backoff_s": 0.01, **options}))
