"""A script that passes the strategy as an object; one rank is enough."""

import torch
from lightning import LightningModule, Trainer

from sdp_plugins.lightning import SMDDPStrategy


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


strategy = SMDDPStrategy(gradient_as_bucket_view=True)
quiet = {"logger": False, "enable_checkpointing": False}
trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4))
print(f"rank 0 of {trainer.world_size}: {trainer.global_step} steps over", end=" ")
print(torch.distributed.get_backend())
