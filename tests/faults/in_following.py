"""Faults of what follows the user's Python: a call, a number, a size or a value is taken for another one."""

from __future__ import annotations

from tests.faults.mutant import CAPTURE, FOLLOWED, Mutant

FOLLOW = "stages/capture/follow"
COUNTS = "tests/strategy/reads_and_sizes/test_followed_counts.py"
SIZES = "tests/strategy/reads_and_sizes/test_varying_sizes.py"
KEPT = "tests/strategy/following/test_followed_kept.py"
GENERATORS = "tests/strategy/following/test_followed_generators.py"
CLASSES = "tests/strategy/following/test_other_classes.py"
SEAMS = "tests/strategy/following/test_seams.py"
ASSIGNED = "tests/strategy/following/test_assigned_data.py"
BY_HAND = "tests/strategy/by_hand/test_followed_by_hand.py"

IN_FOLLOWING: tuple[Mutant, ...] = (
    # ------------------------------------------------------------------ which call it is
    Mutant(
        "a call under another default dtype is the same",
        CAPTURE,
        f"{FOLLOW}/matching.py",
        '        yield f"dtype() is {self.bind(around.dtype)}"\n',
        "",
        (FOLLOWED,),
    ),
    Mutant(
        "recorded calls are made under the default dtype around the step",
        CAPTURE,
        f"{FOLLOW}/values.py",
        "        stack.enter_context(default_dtype(around.dtype))\n",
        "",
        (FOLLOWED,),
    ),
    Mutant(
        "what torch's default dtype makes of integers is not said",
        CAPTURE,
        "stages/capture/record/default_dtype.py",
        "    if torch.get_default_dtype() is torch.float32:\n        return None\n",
        "    return None\n",
        ("tests/strategy/following/test_default_dtype.py",),
    ),
    Mutant(
        "kernels may see another setting in the step",
        CAPTURE,
        f"{FOLLOW}/step.py",
        "if around.kernels != self.kernels:",
        "if False:",
        ("tests/strategy/following/test_kernel_switches.py",),
    ),
    Mutant(
        "a call that a path knows may see other kernels",
        CAPTURE,
        f"{FOLLOW}/matching.py",
        '            yield f"switch{i}() == {value}"\n',
        '            yield "True"\n',
        ("tests/strategy/following/test_kernel_switches.py",),
    ),
    Mutant(
        "a call under other autocast is the same",
        CAPTURE,
        f"{FOLLOW}/matching.py",
        '        yield "not casts()" if around.autocast is None else f"autocast() == {self.bind(around.autocast)}"\n',
        "",
        (FOLLOWED,),
    ),
    Mutant(
        "casts of another block of autocast are the same",
        CAPTURE,
        f"{FOLLOW}/matching.py",
        'f"keeps_casts() and step.block == {around.block}"',
        '"keeps_casts()"',
        ("tests/strategy/following/test_kept_casts.py",),
    ),
    Mutant(
        "casts of weights do not outlast a call",
        CAPTURE,
        f"{FOLLOW}/values.py",
        "        torch.autocast_increment_nesting()\n        try:",
        "        torch.autocast_increment_nesting()\n        torch.autocast_decrement_nesting()\n        try:",
        ("tests/strategy/following/test_kept_casts.py",),
    ),
    Mutant(
        "scripted functions are optimized in a step",
        CAPTURE,
        f"{FOLLOW}/step.py",
        "private.optimize_scripts(False)",
        "private.optimize_scripts(True)",
        ("tests/strategy/following/test_followed_outside_of_torch.py",),
    ),
    Mutant(
        "a step goes on eagerly though a transform's results are held",
        CAPTURE,
        f"{FOLLOW}/eager_run.py",
        " or step.wrapped.are_held)",
        ")",
        ("tests/strategy/following/test_transforms.py",),
    ),
    Mutant(
        "known gradients replace those of a backward pass that has paused",
        CAPTURE,
        f"{FOLLOW}/by_hand.py",
        "for key in settled.keys() - self._in_engine:",
        "for key in settled:",
        ("tests/strategy/by_hand/test_followed_by_hand.py",),
    ),
    Mutant(
        "whether a tensor from outside is trained is not compared",
        CAPTURE,
        f"{FOLLOW}/step_state.py",
        "if kind.type is not _class_of(tensor) or kind.trained is not tensor.requires_grad:",
        "if kind.type is not _class_of(tensor):",
        (BY_HAND,),
    ),
    Mutant(
        "one parameter is as good as another",
        CAPTURE,
        f"{FOLLOW}/step_state.py",
        "return kind.name is None or self.follower.is_named(kind.name, tensor)",
        "return True",
        (FOLLOWED,),
    ),
    Mutant(
        "results with other numbers are taken to be as large",
        CAPTURE,
        f"{FOLLOW}/recorder.py",
        "        return [TensorSpec.of(t) for t in made] == note.specs\n",
        "        return True\n",
        (FOLLOWED,),
    ),
    # ------------------------------------------------------------------ sizes
    Mutant(
        "placeholders keep the sizes of the batch before",
        CAPTURE,
        f"{FOLLOW}/sizes.py",
        "        note.moulds = moulds\n        note.handed.clear()\n",
        "        note.moulds = moulds\n",
        (SIZES,),
    ),
    Mutant(
        "one row is treated like many",
        CAPTURE,
        f"{FOLLOW}/data_counts.py",
        "                note.least = count + 1\n",
        "                note.least = 0\n",
        (COUNTS,),
    ),
    Mutant(
        "a call for one count is for all",
        CAPTURE,
        f"{FOLLOW}/data_counts.py",
        "        return not note.pins or all(i >= len(counts) or counts[i] == count for i, count in note.pins.items())",
        "        return True",
        (COUNTS,),
    ),
    # ------------------------------------------------------------------ random numbers, results that are kept
    Mutant(
        "what is done to torch's generator is not seen",
        CAPTURE,
        f"{FOLLOW}/own_generator.py",
        "        if known == now:\n            return False\n",
        "        if known is not None:\n            return False\n",
        (GENERATORS,),
    ),
    Mutant(
        "a backward pass may reach into the step before",
        CAPTURE,
        f"{FOLLOW}/placeholders.py",
        "        if made_at is not None and trained:\n",
        "        if made_at is None and trained:\n",
        (KEPT,),
    ),
    # ------------------------------------------------------------------ seams
    Mutant(
        "tensors of the user's own class are taken for torch's",
        CAPTURE,
        "_private_api/co_execution.py",
        "    return any(one not in (None, *_OF_NO_CLASS) for one in own)\n",
        "    return False\n",
        (CLASSES,),
    ),
    Mutant(
        "a number is put back for one that equals it by chance",
        CAPTURE,
        "stages/capture/record/recorder.py",
        " and not _is_common(value):\n",
        ":\n",
        (SEAMS,),
    ),
    Mutant(
        "memory that two tensors of the batch share is not noticed",
        CAPTURE,
        f"{FOLLOW}/recorder.py",
        "        if any(type(root) is Given and root.position in shared for root in note.writes):\n",
        "        if False:\n",
        (SEAMS,),
    ),
    Mutant(
        "counts are in the same order in all samples",
        CAPTURE,
        "ir/counted.py",
        "    sets[1].sort(reverse=True)\n",
        "    sets[1].sort()\n    sets[2].sort()\n",
        ("tests/ir/test_counted.py",),
    ),
    Mutant(
        "a placeholder with attributes of the user's is used again",
        CAPTURE,
        f"{FOLLOW}/matching.py",
        " and not h[{m.index}].__dict__",
        "",
        (SEAMS,),
    ),
    Mutant(
        "Python that torch calls back runs when it is recorded alone",
        CAPTURE,
        f"{FOLLOW}/step.py",
        "    if isinstance(value, (FunctionType, MethodType, functools.partial, nn.Module)):\n        return True\n",
        "",
        (SEAMS,),
    ),
    # ------------------------------------------------------------------ assigned data, parameters of results
    Mutant(
        "a write shows not that two tensors should have one memory",
        CAPTURE,
        f"{FOLLOW}/step.py",
        "if self.becoming.apart and self.becoming.is_seen(note.writes):",
        "if False:",
        (ASSIGNED,),
    ),
    Mutant(
        "in an eager step assigned data are copied",
        CAPTURE,
        f"{FOLLOW}/eager_run.py",
        "        values.instead[data_written] = data_given\n",
        "",
        (ASSIGNED,),
    ),
    Mutant(
        "autograd is not asked whether it has saved the memory of assigned data",
        CAPTURE,
        f"{FOLLOW}/becoming.py",
        "if any(private.storage_of(saved) in memory for saved in private.saved_for(recording.values.made.values())):",
        "if False:",
        (ASSIGNED,),
    ),
    Mutant(
        "a parameter that the step made is not trained in the step in which it joins the optimizer",
        CAPTURE,
        f"{FOLLOW}/step.py",
        "                self._look_at_what_stays()\n",
        "",
        ("tests/strategy/following/test_made_parameters.py",),
    ),
    Mutant(
        "what a step changed before it ran again stays",
        CAPTURE,
        "strategy/steps/iteration.py",
        "keeps = following.may_run_again or meeting is not None and meeting.is_new",
        "keeps = meeting is not None and meeting.is_new",
        ("tests/strategy/following/test_transforms.py",),
    ),
    Mutant(
        "data are written into memory that others have had since before the step",
        CAPTURE,
        f"{FOLLOW}/becoming.py",
        "type(known) is not Made and not private.is_memory_its_own(tensor):",
        "known is None and not private.is_memory_its_own(tensor):",
        (ASSIGNED,),
    ),
    Mutant(
        "placeholders show no strides below transforms",
        CAPTURE,
        f"{FOLLOW}/placeholders.py",
        'shows = self.show_strides and spec.device.type == "cpu"',
        "shows = False",
        ("tests/strategy/following/test_transforms.py",),
    ),
)
