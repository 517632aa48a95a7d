"""The rows of the support matrix that decide the mode of a run, each with its detection at setup.

*compiled* (one graph), *split* (a graph up to ``p.grad``, the user's hooks, a graph for the update), *eager* (plain
autograd, gradients averaged over the ranks as in DDP; only with replicated parameters) or *rejected*.
``docs/support_matrix.md`` has these rows, and those of all features that need no other mode, with their tests.
"""

from __future__ import annotations

from lightning_spmd.strategy.support.detectors import (
    Context,
    autograd_hooks,
    averaging_of_parts,
    backward_override,
    by_hand_eagerly,
    clipping_override,
    dataloader_iter,
    detect_anomaly,
    foreign_accelerator,
    foreign_layer_sync,
    foreign_precision,
    foreign_scaler,
    gradient_hooks,
    late_gradient_readers,
    needs_closure,
    no_optimizer,
    optimizer_hooks,
    own_optimizer,
    pruning,
    scripted,
    zero_grad_override,
)
from lightning_spmd.strategy.support.feature import Feature, Finding, Mode


def classify(context: Context) -> tuple[Mode, list[Finding]]:
    """The mode of a run and the findings that decided it, worst first."""
    findings = [Finding(feature, found) for feature in FEATURES if (found := feature.detect(context)) is not None]
    findings.sort(key=lambda f: -list(Mode).index(f.feature.mode))
    return (findings[0].feature.mode if findings else Mode.COMPILED), findings


_SPLIT_NOTE = "p.grad is real and reduced when the hook runs; the update is a graph of its own"
FEATURES: tuple[Feature, ...] = (
    Feature(
        "precision 16-mixed with a GradScaler of another class than torch's",
        Mode.EAGER,
        "its decisions are its own",
        foreign_scaler,
    ),
    Feature(
        "precision transformer-engine, bitsandbytes and others",
        Mode.REJECTED,
        "use 32-true, bf16-true, bf16-mixed, 16-mixed or 64-true",
        foreign_precision,
    ),
    Feature(
        "accelerators other than cpu and cuda", Mode.REJECTED, "use accelerator='cpu' or 'gpu'", foreign_accelerator
    ),
    Feature(
        "on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step",
        Mode.SPLIT,
        "p.grad is real and reduced when the hook asks; two graphs, or one that pauses where iterations can overlap",
        gradient_hooks,
    ),
    Feature(
        "hooks, schedulers and loggers between two steps that read p.grad",
        Mode.SPLIT,
        "found in their code, and in what it reaches; p.grad is real until the next step; what is not found, an error",
        late_gradient_readers,
    ),
    Feature("configure_gradient_clipping overridden", Mode.SPLIT, _SPLIT_NOTE, clipping_override),
    Feature("optimizer_zero_grad overridden", Mode.SPLIT, _SPLIT_NOTE, zero_grad_override),
    Feature(
        "optimizer step hooks",
        Mode.SPLIT,
        "gradients come from a graph, optimizer.step() itself runs eagerly",
        optimizer_hooks,
    ),
    Feature("backward overridden", Mode.EAGER, "user code runs autograd", backward_override),
    Feature("hooks on parameters (wandb.watch)", Mode.EAGER, "autograd must call them", autograd_hooks),
    Feature(
        "optimizers that are none of torch's own, LBFGS, Adafactor",
        Mode.SPLIT,
        "gradients come from a graph, optimizer.step(closure) itself runs; each call of the closure runs that graph",
        own_optimizer,
    ),
    Feature(
        "LBFGS and other optimizers that re-evaluate the closure, with sharded state or bf16_updates",
        Mode.EAGER,
        "the closure runs several times a step",
        needs_closure,
    ),
    Feature(
        "manual optimization with hooks on gradients or steps, 16-mixed, or a parameter in two optimizers",
        Mode.EAGER,
        "gradients are averaged over the ranks",
        by_hand_eagerly,
    ),
    Feature("configure_optimizers returns None", Mode.EAGER, "nothing to optimize", no_optimizer),
    Feature("training_step(dataloader_iter)", Mode.EAGER, "the step fetches its own data", dataloader_iter),
    Feature("detect_anomaly", Mode.EAGER, "anomaly detection watches autograd at work", detect_anomaly),
    Feature(
        "StochasticWeightAveraging, WeightAveraging with sharded parameters",
        Mode.REJECTED,
        "they keep a whole copy of the model; use data_parallel='replicate' or 'zero2'",
        averaging_of_parts,
    ),
    Feature("ModelPruning", Mode.REJECTED, "it reparametrises modules while training; prune before or after", pruning),
    Feature(
        "layer-sync plugins other than Lightning's own",
        Mode.REJECTED,
        "remove the plugin: batch-norm statistics are global anyway",
        foreign_layer_sync,
    ),
    Feature(
        "submodules compiled by torch.jit",
        Mode.EAGER,
        "they run without Python, and their tensors cannot be exchanged",
        scripted,
    ),
)
