"""Makes the recipe's teacher the reference model of TRL's KL term."""

from typing import Any

import torch
from trl.models import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from grpo_cli.models.loading import load_adapter, load_model
from grpo_cli.models.teacher import Teacher
from grpo_cli.models.teacher_server import TeacherServer
from grpo_cli.recipe.teacher import TeacherConfig
from grpo_cli.training.trainer import RunTrainer


def attach_teacher(
    trainer: RunTrainer,
    config: TeacherConfig,
    teacher: Teacher | TeacherServer,
    device: torch.device | None,
) -> None:
    """Have the trainer learn from a teacher: loaded, frozen and whole on each process, or on its server.

    TRL makes a reference model only of the trained one, and none if that has adapters.

    Source: `GRPOTrainer.__init__`, trl 1.16.

    Args:
        trainer: Made with `beta: 0`.
        device: Where the weights are read to; None is the CPU.

    Raises:
        SetupError: The weights cannot be loaded.
    """
    if isinstance(teacher, TeacherServer):
        trainer.ref_model = teacher
    else:
        trainer.ref_model = _load(trainer, teacher, device)
    trainer.beta = trainer.args.beta = config.weight


def _load(trainer: RunTrainer, teacher: Teacher, device: torch.device | None) -> Any:
    model = load_model(
        teacher.model, device_is_cuda=trainer.accelerator.device.type == "cuda", device=device
    )
    if teacher.adapter is not None:
        # peft draws weights before it reads them; the student's samples must not depend on that.
        with torch.random.fork_rng([] if device is None else [device]):
            model = load_adapter(model, teacher.adapter, teacher.model.path)
        model = model.merge_and_unload()
    model = model.eval().requires_grad_(False)
    disable_dropout_in_model(model)
    add_fused_lm_head(model, temperature=trainer.temperature)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)
