"""The RISE loss in a training loop of one's own: natural answers by policy gradient, guided ones by the guide loss."""

import torch
from torch import nn

from rise_kernels import linear_rise_loss

torch.manual_seed(0)
vocabulary, width, batch, length = 32_000, 64, 4, 48
embed, backbone = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)  # any model of yours
head = nn.Linear(width, vocabulary, bias=False)
optimizer = torch.optim.AdamW([*embed.parameters(), *backbone.parameters(), *head.parameters()], lr=1e-3)

tokens = torch.randint(vocabulary, (batch, length + 1))  # answers that were sampled, graded and padded
advantage = torch.tensor([1.2, -0.7, 0.4, 0.6])  # the last answer is a guided one: its gain over the natural mean
is_guide = torch.tensor([False, False, False, True])
weight = torch.where(is_guide, 0.05 * advantage / length, 1 / (3 * length))  # all normalisers, fixed beforehand

for step in range(3):
    hidden, _ = backbone(embed(tokens[:, :-1]))
    result = linear_rise_loss(
        hidden.flatten(0, 1),  # [N, D]; nowhere are there logits [N, V]
        head.weight,
        tokens[:, 1:].flatten(),
        weight.repeat_interleave(length),
        advantage.repeat_interleave(length),
        is_guide.repeat_interleave(length),
        gamma=0.1,
    )
    optimizer.zero_grad()
    result.loss.backward()
    optimizer.step()
    support = result.support[-length:].mean()
    print(f"step {step}  loss {result.loss:.4f}  guide loss {result.guide_loss:.4f}  mean support {support:.5f}")
