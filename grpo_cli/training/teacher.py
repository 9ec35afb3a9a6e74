"""The recipe's teacher, as the reference model of TRL's KL term."""

from dataclasses import dataclass
from typing import Any

import torch
from trl.models import prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from grpo_cli.models.loading import load_adapter, load_model
from grpo_cli.models.teacher import Teacher, find_teacher, fingerprint_teacher
from grpo_cli.models.teacher_server import TeacherServer
from grpo_cli.recipe.teacher import TeacherConfig
from grpo_cli.training.session import Session


@dataclass(frozen=True)
class TeacherReference:
    """A teacher that a trainer learns from: loaded, frozen and whole on each process, or on its server.

    TRL makes a reference model only of the trained one, and none if that has adapters.

    Source: `GRPOTrainer.__init__`, trl 1.16.
    """

    teacher: Teacher | TeacherServer
    weight: float
    """Of the KL term, TRL's `beta`."""
    session: Session
    device: torch.device | None
    """Where the weights are read to; None is the CPU."""

    def load(self, trainer: Any) -> Any:
        """Return the reference model of a trainer that was made with `beta: 0`.

        Raises:
            SetupError: The weights cannot be loaded.
        """
        self.session.report("loading the teacher")
        teacher, device = self.teacher, self.device
        if isinstance(teacher, TeacherServer):
            return teacher
        model = load_model(teacher.model, device_is_cuda=not self.session.cpu, device=device)
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


def open_teacher(
    session: Session, config: TeacherConfig, device: torch.device | None
) -> TeacherReference:
    """Return the recipe's teacher; its fingerprint goes into the manifest.

    Raises:
        RunError: The run is resumed, and began with another teacher.
    """
    teacher = find_teacher(session.recipe) or TeacherServer(str(config.base_url))
    if isinstance(teacher, TeacherServer):
        fingerprint: str | None = teacher.model
    else:
        fingerprint = fingerprint_teacher(teacher)
    before = session.manifest.get("teacher")
    session.refuse_change("the teacher", before, fingerprint)
    session.annotate_manifest(teacher=fingerprint)
    return TeacherReference(teacher, config.weight, session, device)
