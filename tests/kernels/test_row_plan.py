"""Which rows a call computes, and that rows which already stand in order are not copied."""

from __future__ import annotations

import pytest
import torch

from rise_kernels.rows import plan_rows


@pytest.mark.parametrize(
    "rows, n_grad, order",
    [  # of each row: gradient (g), statistics only (s), ignored (i), of weight 0 (0)
        ("gggg", 4, None),
        ("ggss", 2, None),
        ("gsi0", 1, None),
        ("sss0", 0, None),
        ("ii00", 0, None),
        ("igsg", 2, [1, 3, 2]),
        ("sgg0", 2, [1, 2, 0]),
        ("0ggg", 3, [1, 2, 3]),
    ],
)
def test_order(rows, n_grad, order):
    target = torch.tensor([-100 if row == "i" else 5 for row in rows])
    weighted, may_have_grad = (torch.tensor([row not in none for row in rows]) for none in ("0", "0s"))
    plan = plan_rows(target, 8, -100, weighted, may_have_grad)
    assert (plan.total, plan.n, plan.n_grad) == (4, sum(row in "gs" for row in rows), n_grad)
    assert (plan.order if order is None else plan.order.tolist()) == order
    x = torch.arange(8.0).reshape(4, 2)
    if order is None and plan.n:
        assert plan.take(x).data_ptr() == x.data_ptr()
    chosen = plan.take(x[:, 0])
    assert torch.equal(plan.put(chosen), torch.tensor([x[i, 0] if rows[i] in "gs" else 0.0 for i in range(4)]))
