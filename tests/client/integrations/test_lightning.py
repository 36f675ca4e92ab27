"""A fit's losses and weights with the callback are bit for bit those without."""

from __future__ import annotations

import importlib
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from support import frameworks
from support.planning import mind_the_device_alone
from support.training import assert_identical
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
with suppress(ImportError):  # Lightning does so in a test, where its descriptors would be counted
    importlib.import_module("mpi4py.MPI")

from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402 - skipped before
from storm_client.integrations import lightning as integration  # noqa: E402
from storm_client.integrations.lightning import OffloadCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_each_device")

MIN_BYTES = 1024
STEPS = 6


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16), nn.Tanh()
        )
        self.losses: list[torch.Tensor] = []
        self.grad_in_validation: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch[0].exp()).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():  # so that something is saved, and hooks would see it
            loss = self.layers(batch[0].exp()).square().mean()
        self.log("val_loss", loss.detach())
        self.grad_in_validation.append(loss.requires_grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(Net):
    """Two losses and backward passes a step, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class Skipping(Net):
    """Skips every batch but the first of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx else None


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))


def rows() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(64, 16, generator=generator)), batch_size=16)


def fit(net: Net, folder: Path, *callbacks: Any, logger: Any = False, **settings: Any) -> Any:
    torch.manual_seed(2)  # of what is dropped
    trainer = lightning.Trainer(
        accelerator="cpu" if frameworks.is_cpu() else "gpu",
        devices=1,
        max_steps=STEPS,
        default_root_dir=str(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        callbacks=list(callbacks),
        **settings,
    )
    trainer.fit(net, rows(), rows())
    return trainer


SETTINGS = {
    "float32": {},
    "autocast": {"precision": "bf16-mixed"},
    "validation-between": {"val_check_interval": 2},
    "accumulation": {"accumulate_grad_batches": 2, "max_epochs": 3},
    "clipping": {"gradient_clip_val": 0.5},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Net, name) for name in SETTINGS),
        *((ByHand, name) for name in ("autocast", "validation-between")),
        *((Skipping, name) for name in ("float32", "accumulation")),
    ],
)
def test_losses_and_weights_are_identical(
    kind: Any, name: str, client: storm.Client, tmp_path: Path
) -> None:
    settings = SETTINGS[name]
    plain, offloaded = kind(), kind()
    fit(plain, tmp_path, **{"max_epochs": 2, **settings})
    callback = OffloadCallback(client=client, min_bytes=MIN_BYTES)
    fit(offloaded, tmp_path, callback, **{"max_epochs": 2, **settings})
    assert_identical(
        [*offloaded.losses, *offloaded.parameters()], [*plain.losses, *plain.parameters()]
    )
    assert offloaded.losses
    stats = callback.offload.stats()
    assert stats.offloaded_bytes > 0
    assert set(stats.kept) <= frameworks.may_keep()


def test_evaluation_is_left_alone(client: storm.Client, tmp_path: Path) -> None:
    """What autograd saves there is not seen, be it in a fit or after it."""
    counted = []
    for batches in (0, 4):
        net = Net()
        callback = OffloadCallback(client=client, min_bytes=MIN_BYTES, replay=False)
        trainer = fit(net, tmp_path, callback, limit_val_batches=batches, max_epochs=1)
        assert len(net.grad_in_validation) == (0 if not batches else batches + 2)
        trainer.validate(net, rows(), verbose=False)
        counted.append(callback.offload.stats().saved_bytes)
    assert counted[0] == counted[1] > 0


def test_statistics_are_logged(
    client: storm.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mind_the_device_alone(monkeypatch)
    logger = Recorder()
    callback = OffloadCallback(client=client, min_bytes=MIN_BYTES, replay=False)
    fit(Net(), tmp_path, callback, logger=logger, log_every_n_steps=2, max_epochs=2)
    logged = [(step, metrics) for step, metrics in logger.logged if "offload_ratio" in metrics]
    assert [step for step, _ in logged] == [2, 4, 6]
    left = callback.offload.stats().offloaded_bytes / STEPS / (1 << 30)
    each = [metrics["offload_gib"] for _, metrics in logged]  # a GPU's plans are compared meanwhile
    assert sum(each) / len(each) == pytest.approx(left, abs=1e-6)


def test_the_strategy_is_as_it_was(client: storm.Client, tmp_path: Path) -> None:
    callback = OffloadCallback(client=client, min_bytes=MIN_BYTES)
    trainer = fit(Net(), tmp_path, callback, max_epochs=1)
    assert "training_step" not in vars(trainer.strategy)

    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            raise RuntimeError("no such layer")

    seen = []

    class Watch(lightning.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(vars(trainer.strategy).get("training_step"))

    with pytest.raises(RuntimeError, match="no such layer"):
        fit(Failing(), tmp_path, callback, Watch(), max_epochs=1)
    assert seen == [None]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_copy_begins_anew() -> None:
    copied = pickle.loads(pickle.dumps(OffloadCallback(min_bytes=MIN_BYTES)))
    assert type(copied) is OffloadCallback
    with pytest.raises(storm.UsageError, match=r"where trainer.fit\(model\) starts"):
        _ = copied.offload
    with pytest.raises(AttributeError, match="has no attribute 'Callback'"):
        _ = integration.Callback


def test_wrong_options_are_refused_where_training_starts(
    client: storm.Client, tmp_path: Path
) -> None:
    with pytest.raises(storm.UsageError, match="did you mean 'min_bytes'"):
        fit(Net(), tmp_path, OffloadCallback(client=client, min_byte=1), max_epochs=1)
