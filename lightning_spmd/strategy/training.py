"""How a strategy trains: the mode of a fit, its iteration, and what is kept between Lightning's hooks of one batch."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_spmd import _private_api as private
from lightning_spmd.errors import CannotShowError, ConfigurationError
from lightning_spmd.ir.first import first
from lightning_spmd.ir.node_info import TensorSpec
from lightning_spmd.ir.placement import REPLICATE, Partial, Placement
from lightning_spmd.ir.several_optimizers import SeveralOptimizers, parts_of
from lightning_spmd.ir.signature import GraphInput, InputRole
from lightning_spmd.ir.steps import CapturedStep, Variant
from lightning_spmd.messages import tell, warn
from lightning_spmd.parallel.parallel_plan import options_in_parts
from lightning_spmd.parallel.state import is_sharded
from lightning_spmd.stages.capture.follow.notes import kernels_now
from lightning_spmd.stages.capture.follow.queue import LoggedAtOnce
from lightning_spmd.stages.capture.optimizer.optimizer_swap import has_step_of_its_own
from lightning_spmd.stages.capture.record.packing import in_memory_order_of
from lightning_spmd.stages.capture.user_code import user_location
from lightning_spmd.strategy.graphs.run_context import FellBack, GraphSettings, Ran, RunContext, named_arguments
from lightning_spmd.strategy.modes import ModeOfRun
from lightning_spmd.strategy.notices.run_account import Accounts
from lightning_spmd.strategy.ranks.places import compare_training_batches, meet_after_backward, meet_in_training
from lightning_spmd.strategy.state.layer_sharing import LayerSharing
from lightning_spmd.strategy.state.memory import gradients_of, tensors_on_other_devices
from lightning_spmd.strategy.state.new_parameters import NewParameters
from lightning_spmd.strategy.state.random_state import RandomState
from lightning_spmd.strategy.state.replaced_tensors import give_successors
from lightning_spmd.strategy.state.state_layout import StateLayout
from lightning_spmd.strategy.state.wide_state import check_precision
from lightning_spmd.strategy.steps.eager_path import add_gradients, average_gradients, synced
from lightning_spmd.strategy.steps.following import EndedByUser, RanEagerly
from lightning_spmd.strategy.steps.iteration import EagerOnce, TrainingIteration
from lightning_spmd.strategy.steps.replay import StepsInGraphs
from lightning_spmd.strategy.support.detectors import Context, own_optimizer
from lightning_spmd.strategy.support.feature import Mode
from lightning_spmd.strategy.user_hooks.hidden_gradients import HiddenGradients, HiddenLeafGradient
from lightning_spmd.strategy.user_hooks.overlapping import Overlapping
from lightning_spmd.strategy.user_hooks.parts_as_wholes import PartsAsWholes
from lightning_spmd.strategy.user_hooks.pauses import PATIENCE, Pauses, may_pause


class Training:
    """The fits of one strategy, one after the other.

    Args:
        settings: the settings that all its graphs share.
        layout: the placement of state.
        layers: the layers that ranks share.
        steps: the methods that have run as graphs.
        random: the random state for checkpoints.
        wholes: around the user's hooks.

    Attributes:
        mode: the mode of the current fit.
        iteration: its graphs; None if it runs eagerly.
        sync_blocked: whether gradients stay this rank's own for now.
        accounts: the account of the fit.
        ran: how the last micro-batch ran.
    """

    def __init__(
        self,
        settings: GraphSettings,
        layout: StateLayout,
        layers: LayerSharing,
        steps: StepsInGraphs,
        random: RandomState,
        wholes: PartsAsWholes,
    ) -> None:
        self.mode = Mode.EAGER
        self.iteration: TrainingIteration | None = None
        self.sync_blocked = False
        self._settings = settings
        self._ranks = settings.ranks
        self._layout = layout
        self._layers = layers
        self._steps = steps
        self._random = random
        self._wholes = wholes
        self._modes = ModeOfRun()
        self._module: Any = None
        self._new_parameters: NewParameters | None = None
        self._stepping = False
        self._ran_forward = False
        self._backward_passes = 0  # of the current batch, on the eager path
        self._steps_eagerly = False
        self._gradients: list[tuple[Tensor, Tensor]] | None = None  # of a loss whose backward pass has been
        self._own_steps = False  # of an optimizer that is none of torch's
        self._replaced: list[bool] = []
        self._groups: list[tuple[int, int]] = []  # of parameters: which lists, and how long
        self._ran_eagerly = False  # the micro-batch before, though others are graphs
        self._held: dict[str, Tensor] = {}
        self._switches: tuple[torch.dtype, tuple[bool, ...]] | None = None
        """Those under which the graph of the last step ran, its backward pass too."""
        self._overlapping = Overlapping(settings, lambda: self.iteration and self.iteration.pending, self.flush)
        self._are_shares = False  # these are of a rank's own batch
        self._pauses: Pauses | None = None  # where graphs pause for hooks on gradients
        self._hidden = HiddenGradients()
        self._others: tuple[int, int, list[nn.Parameter]] | None = None  # with numbers of graphs, and of its parameters
        self._unzeroed = False  # eager training still has the gradients of the last update
        self._signature: tuple[Any, inspect.Signature, tuple[str, ...]] | None = None  # of training_step
        self.accounts = Accounts(settings)
        self.ran = Ran()

    # ------------------------------------------------------------------ the beginning
    def forget(self) -> None:
        """Begin a new run: notices that are given once per run may be given again."""
        self._modes.begin()
        self._new_parameters = None

    def begin(self, module: Any) -> None:
        """Decide how to train; all ranks together.

        Raises:
            ConfigurationError: this cannot be trained.
        """
        self._module = module
        self.accounts.begin(module.trainer)
        if self._ranks.mesh is not None:
            self._random.streams = self._ranks.streams(module.trainer.strategy.broadcast(torch.initial_seed()))
        self._start()

    def _start(self) -> None:
        module, trainer = self._module, self._module.trainer
        check_precision(self._settings.bf16_updates, trainer.precision_plugin)
        if self._settings.bf16_updates != "plain" and not module.automatic_optimization:
            raise ConfigurationError(
                f"bf16_updates={self._settings.bf16_updates!r} needs automatic optimization, and this module optimizes "
                "by hand. Leave bf16_updates out"
            )
        self._decide()
        device = trainer.strategy.root_device
        elsewhere = tensors_on_other_devices(module, device)
        if elsewhere:
            raise ConfigurationError(
                f"tensors of the module are not on {device}: {', '.join(elsewhere[:5])}. Register them with "
                "register_buffer (or as parameters), so that they move with the module"
            )
        self.iteration = None
        self._overlapping.take_away()
        self._new_parameters = None if self._ranks.control is None else NewParameters(module, self._ranks.control)
        if self.mode is Mode.EAGER:
            return
        overlaps, streams = self._overlapping.choose(module, self.mode), self._random.streams
        settings, optimizers = self._settings, trainer.optimizers
        # what graphs take for the optimizer; of a module that optimizes manually, all of them
        optimizer = optimizers[0] if module.automatic_optimization else SeveralOptimizers(optimizers)
        self.iteration = TrainingIteration(
            RunContext(
                settings,
                module,
                optimizer,
                streams,
                dataclasses.replace(settings.options, overlap_iterations=overlaps),
                settings.dump_dir,
                self._new_parameters,
                self._overlapping.fenced,
                self._came_late,
            )
        )

    def _came_late(self) -> str | None:
        unfenced = None if self._pauses is None else self._pauses.unfenced()
        if unfenced is not None:
            return f"{unfenced}; it came in mid-run, and a graph would not pause for it: register hooks before fit"
        return self._modes.came_late(self._looked_at())

    def _looked_at(self) -> Context:
        """What decides the mode."""
        trainer = self._module.trainer
        in_parts = self._ranks.mesh is not None and self._layout.plan.needs_graphs
        in_graphs = in_parts or self._settings.bf16_updates != "plain"
        return Context(trainer, self._module, trainer.optimizers, in_graphs)

    def _decide(self) -> None:
        """The mode, the worst of what all ranks find."""
        self._pause_no_more()
        trainer, context = self._module.trainer, self._looked_at()
        self._own_steps = own_optimizer(context) is not None
        self._replaced = _replaced_steps(trainer.optimizers)
        in_parts = "" if self._ranks.mesh is None else options_in_parts(self._layout.plan)
        mode, self._steps_eagerly, pauses = self._modes.of_all_ranks(
            context,
            self._ranks.control,
            in_parts,
            self._settings.bf16_updates,
            may_pause=self._ranks.control is not None and may_pause(self._settings.options, trainer),
        )
        self.mode = Mode.COMPILED if pauses else mode
        if pauses:
            self._pauses = Pauses(self._module, self._ranks.all_of_them)
            self._pauses.put_fences()

    def _run_in_two(self, why: str) -> None:
        """From now on hooks on gradients run between two graphs."""
        tell(f"strategy='spmd' runs this training as two graphs from here on, with p.grad between them: {why}")
        self._pause_no_more()
        self.mode = Mode.SPLIT

    def _pause_no_more(self) -> None:
        """From now on graphs do not pause; hooks are the user's own."""
        if self._pauses is not None:
            self._pauses.take_away()
            self._pauses = None

    def look_again(self) -> None:
        """Hooks that came after setup (``wandb.watch`` in ``on_fit_start`` or ``on_train_start``) count as well."""
        if self.iteration is not None:
            self._decide()
            if self.mode is Mode.EAGER:
                self.iteration = None
        if self.iteration is not None and self._overlapping.data_looks(self.iteration.context):
            options = dataclasses.replace(self.iteration.context.options, overlap_iterations=False)
            self.iteration = TrainingIteration(dataclasses.replace(self.iteration.context, options=options))
        compare_training_batches(self._module, self._ranks.control)

    def end(self) -> None:
        """The run is over: hooks are the user's own again."""
        self.accounts.end()
        if self.iteration is not None:
            self.iteration.end()
        self.ran = Ran()
        self._overlapping.take_away()
        self._hidden.take_away()
        self._pause_no_more()

    def flush(self) -> None:
        """Complete the work that the last iteration deferred."""
        if self.iteration is not None:
            self.iteration.flush()

    # ------------------------------------------------------------------ forward
    def step(self, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one micro-batch: everything in the iteration that belongs to it, or only ``training_step``.

        Args:
            eager: runs ``training_step`` as Lightning does.
            args: as Lightning passes them.
            kwargs: likewise.
        """
        self._follow_optimizer()
        # SWA's batch-norm epoch runs forward alone, with momentum=None (an average that depends on a counter)
        iteration = None if private.skips_backward(self._module.trainer) else self.iteration
        self._take_changed_gradients()
        self._backward_passes, self.ran, self._gradients = 0, Ran(), None
        if self._ran_eagerly and iteration is not None:
            self._take_gradients(iteration)
        self._ran_eagerly = False
        if iteration is None:
            meet_in_training(self._module, self._ranks.control, self._new_parameters)
            return self._eagerly(eager, args, kwargs)
        variant = self._variant()
        self._drop_zeroed_gradients(iteration)
        arguments = self._arguments(iteration.context.module.training_step, args, kwargs)
        batch = arguments.pop(first(arguments, "argument of training_step"))
        sought = self._layers.is_sought and self._ranks.mesh is not None and self._layers.size > 1
        iteration.share_layers = self._share_layers if sought else None
        try:
            output = iteration.run(batch, arguments, variant, self._clip)
        except RanEagerly as ran:
            self._finish_eagerly(iteration)
            self._gradients, self._are_shares = ran.gradients, ran.are_shares
            self._steps.add("training_step")
            iteration.at_once.end()
            return ran.returned
        except EndedByUser as ended:
            raise ended.error from None
        except EagerOnce:
            self._finish_eagerly(iteration)
            return self._eagerly(eager, args, kwargs, iteration.at_once)
        except FellBack:
            self._leave_graphs(iteration)
            return self._eagerly(eager, args, kwargs, iteration.at_once)
        except CannotShowError as error:
            self._run_in_two(str(error))
            iteration.at_once.begin_again()
            return self.step(eager, args, kwargs)
        iteration.at_once.end()
        if variant.backward and not variant.by_hand:
            self._tell_who_joined()
            held, own = iteration.leaves
            self._hidden.put(held, HiddenLeafGradient)
            self._hidden.put(own, HiddenLeafGradient, stay=True)
        iteration.leaves = [], []
        if iteration.in_two is not None:
            self._run_in_two(iteration.in_two)
        if self._pauses is not None and iteration.paused is not None:
            self._pauses.begin(iteration.paused)
        self._ran_forward, self.ran = not iteration.update_waits, iteration.ran
        self._switches = torch.get_default_dtype(), kernels_now()
        self._steps.add("training_step")
        if self.mode is Mode.SPLIT:
            self._held = dict(iteration.gradients)
            iteration.gradients.clear()
        return output

    def _variant(self) -> Variant:
        """Which part of an iteration the graph of the current micro-batch is."""
        if not self._module.automatic_optimization:
            return Variant.optimized_by_hand()
        applies, pauses = self._stepping and self.mode is Mode.COMPILED, self._pauses is not None
        return Variant.automatic(applies, self.mode is Mode.SPLIT or pauses)

    def _arguments(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What ``training_step`` gets, by name; signatures cost more than a small step's matrix products."""
        function = getattr(method, "__func__", method)
        if self._signature is None or self._signature[0] is not function:
            signature = inspect.signature(method)
            are_plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())
            self._signature = function, signature, tuple(signature.parameters) if are_plain else ()
        _, signature, names = self._signature
        if len(args) == len(names) and not kwargs:
            return dict(zip(names, args, strict=True))
        return named_arguments(signature, args, kwargs)

    def _follow_optimizer(self) -> None:
        """Graphs are made for one optimizer; a hook may have given the Trainer another one, or it other parameters."""
        iteration, trainer = self.iteration, self._module.trainer
        if self._layout.state is not None:
            groups = [(id(g["params"]), len(g["params"])) for o in trainer.optimizers for g in o.param_groups]
            if groups != self._groups:
                give_successors(trainer.optimizers)
                self._groups = [(id(g["params"]), len(g["params"])) for o in trainer.optimizers for g in o.param_groups]
        if iteration is None or (
            _same(trainer.optimizers, iteration.context.optimizer, self._module)
            and self._replaced == _replaced_steps(trainer.optimizers)
        ):
            return
        iteration.flush()
        self._layout.shard_optimizers(self._module, trainer.optimizers)
        self._start()
        if self.iteration is None:
            self._leave_graphs(iteration)
        else:
            self.iteration.gradients.update(iteration.gradients)

    def _eagerly(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        at_once: LoggedAtOnce | None = None,
    ) -> Any:
        batches = None if self._ranks.mesh is None else self._ranks.batches
        return self._steps.run_eagerly(self._module, "training_step", step, args, kwargs, batches, at_once)

    def _share_layers(self, captured: CapturedStep) -> None:
        """Find the tensor-parallel plan in the first batch's graph, and shard what exists already by it.

        All ranks do this together.
        """
        trainer = self._module.trainer
        self._layers.find(captured, self._module, trainer.strategy.broadcast)
        self._layout.shard_again(self._module, trainer.optimizers)
        self._decide()

    def _drop_zeroed_gradients(self, iteration: TrainingIteration) -> None:
        """Lightning zeroes gradients before the first backward of an accumulation, step or no step."""
        trainer = iteration.context.trainer
        if not iteration.context.module.automatic_optimization:
            return
        if self.mode is not Mode.COMPILED:
            return
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            iteration.gradients.clear()
        elif self._unzeroed:
            warn(
                f"Lightning adds the gradients of training batch {trainer.fit_loop.batch_idx} to those of the update "
                f"before, which it has not zeroed, since accumulate_grad_batches={trainer.accumulate_grad_batches} was "
                "set in the middle; strategy='spmd' begins with this batch's. Set it in on_train_batch_start of a "
                "batch whose index is a multiple of the new value"
            )
        self._unzeroed = False

    def _clip(self, optimizer: Optimizer) -> None:
        """What the graph does between backward and step: Lightning's own hook, as ``Precision`` calls it."""
        trainer = self._module.trainer
        with self._wholes.in_graph():
            self._module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

    def _finish_eagerly(self, iteration: TrainingIteration) -> None:
        """The current micro-batch goes on as eager training's; gradients of those before it become ``p.grad``."""
        self._ran_eagerly = True
        self._show_gradients(iteration)
        iteration.gradients.clear()

    def _show_gradients(self, iteration: TrainingIteration) -> None:
        """Gradients that are held become ``p.grad``, of which the eager path takes the mean over the ranks."""
        parameters, state = dict(iteration.context.module.named_parameters()), self._layout.state
        for name, held in iteration.gradients.items():
            shares, _ = self._held_as(name, parameters[name])
            whole, own = held if state is None else state.whole(held), parameters[name].grad
            whole = whole if shares == 1 else whole * shares
            parameters[name].grad = whole if own is None else whole + own  # which the step has put there

    def _held_as(self, name: str, parameter: Tensor) -> tuple[int, tuple[Placement, ...]]:
        """How a gradient is held between the micro-batches of a step: ranks with a share, and parts."""
        axes = () if self._layout.state is None else self._layout.state.axes
        entry = GraphInput(InputRole.GRADIENT, (name,), name, TensorSpec.of(parameter))
        placements = [self._layout.plan.input_placement(axis, entry) for axis in axes]
        partial = [isinstance(placement, Partial) for placement in placements]
        shares = math.prod(axis.size for axis, is_sum in zip(axes, partial, strict=True) if is_sum)
        return shares, tuple(REPLICATE if is_sum else p for p, is_sum in zip(placements, partial, strict=True))

    def _hide_gradients(self, add: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Until the next step something stands for gradients that eager training has in ``p.grad``.

        Args:
            add: adds what a backward pass of the user's finds; None: eager training zeroes it before it is used.
        """
        iteration = self.iteration
        if iteration is None or self.mode is not Mode.COMPILED or self._ran_eagerly or not iteration.has_left_gradients:
            return
        if self._pauses is None or self._pauses.hidden:
            groups = self._module.trainer.optimizers[0].param_groups
            self._hidden.put((p for group in groups for p in group["params"]), add=add)
            self._hidden.put(self._trained_by_nobody(iteration), add=add)

    def _add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """A backward pass of the user's, between two steps, adds to a gradient that graphs hold."""
        iteration, names = self.iteration, {id(p): name for name, p in self._module.named_parameters()}
        name = names.get(id(parameter))
        if iteration is None or name is None:
            return
        (shares, placements), state = self._held_as(name, parameter), self._layout.state
        if state is not None and is_sharded(placements):
            if not isinstance(parameter, DTensor) or placements != state.placements_of(parameter):
                place = user_location()
                raise ConfigurationError(
                    f"a backward pass between two steps{f' ({place})' if place else ''} adds to the gradient of {name} "
                    "in the middle of an accumulation, which is in parts already: go backward in training_step, or use "
                    f"{options_in_parts(self._layout.plan)}"
                )
            if isinstance(gradient, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
        before = iteration.gradients.get(name)
        gradient = gradient.clone() if shares == 1 else gradient / shares
        iteration.gradients[name] = gradient if before is None else before + gradient

    def _trained_by_nobody(self, iteration: TrainingIteration) -> list[nn.Parameter]:
        """Parameters of steps that the optimizer does not have: an optimizer that a hook steps may have them."""
        if self._others is None or self._others[0] != iteration.captures:
            lists = [group["params"] for group in self._module.trainer.optimizers[0].param_groups]
            theirs = {id(p) for parameters in lists for p in parameters}
            others = [p for p in self._module.parameters() if id(p) not in theirs and id(p) in iteration.met]
            self._others = iteration.captures, sum(map(len, lists)), others
        return self._others[2]

    def _tell_who_joined(self) -> None:
        """Parameters that join the optimizer amid an accumulation: eager training has gradients of them already."""
        trainer, before = self._module.trainer, self._others
        if before is None or not trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
            return
        groups = trainer.optimizers[0].param_groups
        if before[1] == sum(len(group["params"]) for group in groups):
            return
        self._others = None
        theirs = {id(p) for group in groups for p in group["params"]}
        names = {id(p): name for name, p in self._module.named_parameters()}
        joined = [names[id(p)] for p in before[2] if id(p) in theirs and id(p) in names and p.requires_grad]
        if joined:
            more = f" and {len(joined) - 1} others" if joined[1:] else ""
            warn(
                f"{joined[0]}{more} joined the optimizer in the middle of an accumulation (training batch "
                f"{trainer.fit_loop.batch_idx}, accumulate_grad_batches={trainer.accumulate_grad_batches}). Eager "
                "training adds to the gradients of all batches before on which its loss depended, as nothing zeroed "
                "them; strategy='spmd' begins with this batch's. Let parameters join in a batch whose index is a "
                "multiple of accumulate_grad_batches, or in on_train_epoch_start"
            )

    def _take_changed_gradients(self) -> None:
        """Gradients to which the next micro-batch adds its own are what hooks have made of them."""
        changed = self._hidden.take_away()
        self._unzeroed &= not changed
        if self.iteration is not None and changed:
            known = {id(p): name for name, p in self._module.named_parameters()}
            for parameter in changed:
                self.iteration.gradients.pop(known.get(id(parameter), ""), None)
            self._take_gradients(self.iteration)

    def _take_gradients(self, iteration: TrainingIteration) -> None:
        """Gradients of a micro-batch that ran eagerly are held as those of graphs, if they are to be added to."""
        trainer = iteration.context.trainer
        if self.mode is Mode.COMPILED and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
            for name, parameter in iteration.context.module.named_parameters():
                if parameter.grad is not None:
                    (shares, placements), state = self._held_as(name, parameter), self._layout.state
                    held = parameter.grad if shares == 1 else parameter.grad / shares
                    parameter.grad = None
                    iteration.gradients[name] = held if state is None else state.shard(held, placements)

    def _leave_graphs(self, iteration: TrainingIteration) -> None:
        """From now on eagerly; gradients of micro-batches that already ran become ``p.grad``."""
        iteration.flush()
        self.mode = Mode.EAGER
        self.iteration = None
        self._show_gradients(iteration)

    # ------------------------------------------------------------------ backward
    def give_gradients(self, module: Any, *, is_of_step: bool = True) -> bool:
        """Set ``p.grad`` to the gradients of a graph or of a followed step. Returns whether there are any.

        Args:
            module: that is trained.
            is_of_step: no hook has gone on with the loss in place since training_step returned it.
        """
        if self._pauses is not None and (self._ran_eagerly or self._gradients is not None):
            self._pauses.ran_eagerly()
        if self._gradients is not None:
            pairs, self._gradients = self._gradients, None
            for leaf, gradient in pairs:
                owned = in_memory_order_of(leaf, gradient)
                leaf.grad = private.no_view(owned) if leaf.grad is None else leaf.grad.add_(owned)
            if self._are_shares:
                self.average_gradients(module)
            return True
        if self.iteration is None or self._ran_eagerly or not module.automatic_optimization:
            return False
        if not is_of_step or self._switches != (torch.get_default_dtype(), kernels_now()):
            does = "sets the default dtype or what kernels look at" if is_of_step else "changes the loss in place"
            self.iteration.no_more_graphs(
                f"a hook between training_step and the backward pass {does}; in this step the backward pass ran "
                "without that"
            )
        if self._pauses is not None:
            self._pauses.backward()
        add_gradients(module, self._held)
        self._held = {}
        if not self._stepping:
            self._hide_gradients(self._add_gradient)
        return True

    def average_gradients(self, module: Any) -> None:
        """After an eager backward pass: average ``p.grad`` over the ranks, unless that is blocked.

        In a step that is followed each rank has the batch of all of them, and gradients that are no share.
        """
        if self._ranks.control is not None and not self.sync_blocked and not self._ranks.is_followed:
            self._backward_passes += 1
            meet_after_backward(module, self._ranks.control, self._backward_passes)
            average_gradients(module)

    # ------------------------------------------------------------------ step
    def optimizer_step(
        self, eager: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], model: Any, kwargs: Any
    ) -> Any:
        """Run the closure and the optimizer's step, which may be part of the graph.

        Args:
            eager: runs it as Lightning does.
            optimizer: whose step it is.
            closure: forward and backward.
            model: as Lightning passes it.
            kwargs: likewise.
        """
        if self.iteration is None or not self._module.automatic_optimization:  # by hand: in a hook
            self.flush()
            alone = self._ranks.mesh is None or self._ranks.is_followed
            return eager(optimizer, closure if alone else synced(closure), model, **kwargs)
        self._follow_optimizer()
        self._take_changed_gradients()
        if self._own_steps:

            def of_all_ranks() -> Any:
                loss = closure()
                is_own = self._ran_eagerly or self.iteration is None
                return synced(lambda: loss)() if is_own and self._ranks.mesh is not None else loss

            return eager(optimizer, of_all_ranks, model, **kwargs)
        self._stepping, self._ran_forward = True, False
        try:
            result = closure()
        finally:
            self._stepping = False
        in_graphs = self._settings.bf16_updates != "plain"
        if self._ran_eagerly and self.iteration is not None and (in_graphs or self._layout.plan.needs_graphs):
            self._apply(self.iteration, optimizer)
            return result
        # the closure ran eagerly: its gradients are in p.grad, its step is still to come
        if self.iteration is None or self._ran_eagerly:
            ran = (lambda: result) if self._ranks.mesh is None else synced(lambda: result)
            return eager(optimizer, ran, model, **kwargs)
        if self._pauses is not None or self.mode is Mode.SPLIT:
            self._apply(self.iteration, optimizer)
        elif not self._ran_forward:
            self.iteration.apply(dict(self.iteration.gradients), self._clip, reduced=False)
        self._unzeroed = True
        self._hide_gradients()
        return result

    def _apply(self, iteration: TrainingIteration, optimizer: Optimizer) -> None:
        scaler = iteration.context.scaler
        scaler.unscale(optimizer, on_ranks=self._ranks.mesh is not None)
        with self._layout.mixed_placements_allowed(self._module):
            private.after_closure(self._module.trainer.precision_plugin, self._module, optimizer)
        if self._pauses is not None:
            if self._pauses.end():
                iteration.resume()
                return
            if self._pauses.in_vain == PATIENCE:
                self._run_in_two("hooks change gradients, or what the update reads, in every step")
        gradients = gradients_of(self._module, self._layout.state)
        if not self._steps_eagerly:
            try:
                iteration.apply(gradients, None, reduced=True)
            except FellBack:
                self._steps_eagerly = True
        if self._steps_eagerly:
            scaler.step(optimizer)
        scaler.update()


def _replaced_steps(optimizers: Sequence[Any]) -> list[bool]:
    """The optimizers whose ``step`` was replaced."""
    return [has_step_of_its_own(optimizer) for optimizer in optimizers]


def _same(optimizers: Sequence[Optimizer], known: Optimizer | None, module: Any) -> bool:
    """Whether graphs were made for these optimizers."""
    now = optimizers[:1] if module.automatic_optimization else optimizers
    before = () if known is None else parts_of(known)
    return len(now) == len(before) and all(map(operator.is_, now, before))
