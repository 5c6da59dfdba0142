"""The mutants, by name: see run.py."""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault that somebody could really make."""

    name: str
    """What is broken, after the room."""

    seen: str
    """What is broken, and what a user would see."""

    tests: tuple[str, ...]
    """Files, or ids of single ones, which have to notice."""

    file: str
    """What it changes."""

    changes: tuple[tuple[str, str], ...]
    """Text that stands there once, and what the mutant has in its place."""


MUTANTS = (
    Mutant(
        "balance-a-batchs-weights-are-of-one-rank",
        "The factor of a rollout leaves out that FSDP divides gradients by the number of ranks. Every step is smaller than the whole step in one process, by that number; nothing else shows.",
        ("tests/balance/test_balance_batch.py::test_nothing_is_lost_and_no_loss_changes[2]",),
        "balance/data/loss_weights.py",
        (
            (
                "return np.full(num_samples, world_size / max(int(num_loss_tokens.sum()), 1))",
                "return np.full(num_samples, 1.0 / max(int(num_loss_tokens.sum()), 1))",
            ),
        ),
    ),
    Mutant(
        "balance-a-busy-device-counts-as-free",
        "What a rank's device has not computed yet is left out where the rank says when it will be through. Who binds its second microbatch first takes samples from ranks that are no later than itself.",
        ("tests/balance/test_balance_late_binding.py::test_who_asks_first_is_not_the_first_to_be_through",),
        "balance/late_binding/steal_policy.py",
        (
            (
                "return self.end(replace(self.busy, microbatches=[])) if self.busy and self.rate else self.now",
                "return self.now",
            ),
        ),
    ),
    Mutant(
        "balance-a-flattened-dimension-is-taken-for-data",
        "A loader accepts a mesh of which context parallel ranks are a part, flattened with the data parallel ones. Ranks that share a sample get different ones, and attention mixes them up.",
        ("tests/balance/test_balance_mesh.py::test_what_is_no_mesh_of_data_is_refused",),
        "balance/data/place.py",
        (('if _SHARING & set(re.split(r"[^a-z]+", name.lower())):', "if name.lower() in _SHARING:"),),
    ),
    Mutant(
        "balance-a-late-stream-scales-by-own-samples",
        "In a stream that is bound late, a rank that has chosen nothing scales losses by 0. What it takes from others does not count.",
        ("tests/balance/test_balance_stream_late.py::test_one_scale_on_all_ranks_also_where_one_has_chosen_nothing",),
        "balance/data/stream.py",
        (("scale = loss_scale(self.world_size, step.num_loss_tokens)", "scale = self._loss_scale([step])"),),
    ),
    Mutant(
        "balance-a-look-at-a-minibatch-takes-part",
        "A loader takes part in late binding before it is seen to train. Where a rank looks at a minibatch with another loader, samples are computed twice or not at all, or an error stops training.",
        ("tests/balance/test_balance_late_loaders.py::test_nothing_is_opened_before_a_loader_is_seen_to_train",),
        "balance/late_binding/work_queues.py",
        (("self.binds = False", "self.binds = True"),),
    ),
    Mutant(
        "balance-a-minibatch-begun-twice-is-not-noticed",
        "A rank that begins a minibatch anew does not ask whether samples had gone to other ranks, or come from them, in this step. A rank trains on samples that others have trained on.",
        (
            "tests/balance/test_balance_late_binding.py::test_a_minibatch_that_one_rank_has_begun_twice_in_a_step_is_named",
        ),
        "balance/late_binding/work_queues.py",
        (
            (
                "if is_replaced or (other.step == self._queue.step and (other.is_torn or is_alike)):",
                "if is_replaced:",
            ),
        ),
    ),
    Mutant(
        "balance-a-resumed-loader-repeats-a-minibatch",
        "A minibatch counts as done when the next one is asked for, and not when it is handed out. A training that resumes trains on the last minibatch before the checkpoint once more.",
        ("tests/balance/test_balance_loader.py::test_resume_in_the_middle_of_an_epoch",),
        "balance/data/loader.py",
        (
            (
                """                self._num_yielded = number + 1
                yield self._minibatch(planned, mine)""",
                """                yield self._minibatch(planned, mine)
                self._num_yielded = number + 1""",
            ),
        ),
    ),
    Mutant(
        "balance-a-resumed-stream-repeats-a-step",
        "A stream that resumes in the middle of a round gives out the last step before the checkpoint once more (off by one). Its samples are trained on twice, on one rank or on all.",
        ("tests/balance/test_balance_stream_state.py::test_it_goes_on_after_any_minibatch",),
        "balance/data/steps.py",
        (("if number > num_done:", "if number >= num_done:"),),
    ),
    Mutant(
        "balance-a-taken-sample-may-be-another-one",
        "A sample of a stream that is taken is not compared with what its rank has found. Random augmentation makes the loss scale wrong, unnoticed.",
        ("tests/balance/test_balance_stream_late.py::test_a_sample_that_is_another_one_where_it_is_taken_is_refused",),
        "balance/late_binding/stream.py",
        (
            (
                "if found != (entry.length, entry.num_loss_tokens):",
                "if False and found != (entry.length, entry.num_loss_tokens):",
            ),
        ),
    ),
    Mutant(
        "balance-clocks-of-hosts-are-compared",
        "Ranks tell when they began a microbatch by the clock of their own host. Where clocks differ, a rank seems to be through long ago, or not to have begun.",
        ("tests/balance/test_balance_late_loaders.py::test_hosts_have_no_clock_in_common",),
        "balance/late_binding/work_queues.py",
        (("return time.monotonic() - self._opened.met_s", "return time.monotonic()"),),
    ),
    Mutant(
        "balance-each-rank-plans-with-estimates-of-its-own",
        "A rank plans with what it has found by then, also where another rank has laid down something else. Their plans differ, and samples are computed twice or not at all.",
        ("tests/balance/test_balance_late_binding.py::test_whoever_plans_first_decides_and_all_take_that",),
        "balance/late_binding/estimates.py",
        (
            (
                "history = _History(**json.loads(there)) if there else _History([], [-1, 0])",
                "history = _History([], [-1, 0])",
            ),
        ),
    ),
    Mutant(
        "balance-fast-ranks-get-less",
        "Of two partitions the one is chosen that would be better if fast ranks were slow. Plans for ranks of different speeds are worse than they could be.",
        ("tests/balance/test_balance_speeds.py",),
        "balance/partition/kway.py",
        (
            (
                "times = loads if speeds is None else loads / speeds",
                "times = loads if speeds is None else loads * speeds",
            ),
        ),
    ),
    Mutant(
        "balance-last-minibatches-lose-the-dearest-sample",
        "Where the last pools of an epoch are shared out, the dearest sample gets to no rank. A sample of each epoch is never trained on.",
        ("tests/balance/test_balance_quotas.py::test_last_minibatches_have_every_sample_once_and_none_is_empty",),
        "balance/grouping/quota.py",
        (
            (
                'for sample in np.argsort(-values, kind="stable").tolist():  # the dearest first, each to what has least',
                'for sample in np.argsort(-values, kind="stable").tolist()[1:]:  # the dearest first, each to what has least',
            ),
        ),
    ),
    Mutant(
        "balance-nobody-begins-in-parts",
        "A rank that will be late begins its last microbatch whole. Nothing is left to take where a rank has few microbatches, and late binding gains little, unnoticed.",
        ("tests/balance/test_balance_late_binding.py::test_noise_and_a_slow_device_cost_less",),
        "balance/late_binding/steal_policy.py",
        (
            (
                "return bool(self.rate) and len(first) > 1 and sum(map(self.cost, behind)) <= self.cost(first)",
                "return False and len(first) > 1 and sum(map(self.cost, behind)) <= self.cost(first)",
            ),
        ),
    ),
    Mutant(
        "balance-nobody-looks-after-ranks-while-a-store-is-silent",
        "A call to a store is awaited without a limit. Where the process that has the store is stopped, all ranks hang.",
        ("tests/fsdp/test_late_store_faults.py",),
        "balance/data/watched_store.py",
        (("wait_for_rank(answer.done, self._text, None)", "answer.exception()"),),
    ),
    Mutant(
        "balance-partners-choose-for-themselves",
        "Each of the ranks that compute together begins and takes samples for itself, out of one word. They compute different samples, and meet in collectives about different ones.",
        ("tests/balance/test_balance_late_binding.py::test_partners_run_what_their_leader_chooses",),
        "balance/late_binding/work_queues.py",
        (("self.leads = self._together.index == 0", "self.leads = True"),),
    ),
    Mutant(
        "balance-partners-read-samples-of-their-own",
        "A rank's place in the data is counted by its number in the job, not in the mesh that it was given. Tensor parallel partners compute on different samples, and some samples are not trained on.",
        ("tests/balance/test_balance_mesh.py",),
        "balance/data/place.py",
        (("return cls(ranks.index(me), len(ranks), ranks)", "return cls(me % len(ranks), len(ranks), ranks)"),),
    ),
    Mutant(
        "balance-samples-predict-the-next-sample",
        "In a packed row only the first sample loses its first label. The last token of each sample is trained to predict the first one of another.",
        ("tests/balance/test_balance_loader.py::test_pack_collate_by_hand",),
        "balance/data/collate.py",
        (('row["labels"][:, starts[:-1].long()] = IGNORED', 'row["labels"][:, starts[:1].long()] = IGNORED'),),
    ),
    Mutant(
        "balance-the-last-output-gets-no-gradient",
        "The last output of each microbatch of an encoder gets a gradient of zeros (off by one). Encoders train on all images but one of each microbatch.",
        ("tests/multimodal/test_multimodal_run.py::test_losses_and_gradients_are_those_of_one_process",),
        "balance/multimodal/run.py",
        (
            (
                "(output, grads[at] if at < len(grads) else torch.zeros_like(output))",
                "(output, grads[at] if at < len(grads) - 1 else torch.zeros_like(output))",
            ),
        ),
    ),
    Mutant(
        "balance-the-mean-is-of-one-ranks-tokens",
        "The loss is divided by the loss tokens of this rank, and not by those of the whole minibatch. A token counts for more where its rank has fewer of them: another objective, unnoticed.",
        ("tests/balance/test_balance_loader.py::test_minibatch_loss_is_the_exact_mean_over_tokens",),
        "balance/data/loader.py",
        (
            (
                "total = int(self.num_loss_tokens[planned.samples].sum())",
                "total = int(sum(self.num_loss_tokens[mine].sum() for mine in planned.of_rank(self.rank)))",
            ),
        ),
    ),
    Mutant(
        "balance-the-oldest-sample-may-wait-for-ever",
        "The oldest sample of a pool is chosen only if it fits. A long sample stays in the pool until the end of the epoch.",
        ("tests/balance/test_balance_quotas.py::test_a_quota_is_kept_and_the_oldest_sample_goes",),
        "balance/grouping/quota.py",
        (
            (
                """    chosen = [0]
    each = values.tolist()
    left -= each[0]
    mean = float(values.mean())
    is_dear = values[1:] > usual
    by_turns = [*(np.flatnonzero(is_dear) + 1).tolist(), *(np.flatnonzero(~is_dear) + 1).tolist()]""",
                """    chosen = list[int]()
    each = values.tolist()
    mean = float(values.mean())
    is_dear = values > usual
    by_turns = [*np.flatnonzero(is_dear).tolist(), *np.flatnonzero(~is_dear).tolist()]""",
            ),
        ),
    ),
    Mutant(
        "balance-two-ranks-take-the-same-samples",
        "Who takes samples leaves no name behind. Two ranks that take the same ones at the same time write the same word, and each finds its own. They are computed twice.",
        ("tests/balance/test_balance_late_binding.py::test_of_two_ranks_that_take_the_same_samples_one_has_them",),
        "balance/late_binding/work_queues.py",
        (
            (
                "queue, microbatches=[*before, left] if left else before, thieves=[*queue.thieves, self.rank]",
                "queue, microbatches=[*before, left] if left else before, thieves=queue.thieves",
            ),
        ),
    ),
    Mutant(
        "balance-what-a-microbatch-takes-is-part-of-its-samples",
        "What a microbatch takes beside its samples is taken for a part of them. Plans cut small what costs more in pieces.",
        (
            "tests/balance/test_balance_late_binding.py::test_what_a_microbatch_takes_is_told_from_times_of_several_sizes",
        ),
        "balance/late_binding/estimates.py",
        (
            (
                "return float(max(fixed_s, 0.0) / samples_s * costs.mean()) if samples_s > 0 else self._microbatch_cost",
                "return float(0.0 * fixed_s / samples_s) if samples_s > 0 else self._microbatch_cost",
            ),
        ),
    ),
    Mutant(
        "balance-what-joins-has-no-room",
        "What joins a microbatch is not held against the room that is left there. A rank runs out of memory, where costs and tokens do not go together.",
        ("tests/balance/test_balance_late_binding.py::test_what_joins_makes_both_end_early_and_has_room",),
        "balance/late_binding/steal_policy.py",
        (
            (
                "last = [sample for sample in queue.microbatches[-1] if self.plan.lengths[sample] <= room]",
                "last = share.microbatches[-1]",
            ),
        ),
    ),
    Mutant(
        "balance-what-was-taken-is-computed-by-its-rank-too",
        "A rank that begins a microbatch does not look whether others have taken some of it since it looked last. Their samples are computed twice, now and then.",
        ("tests/balance/test_balance_late_binding.py::test_each_sample_is_computed_once_whoever_comes_between",),
        "balance/late_binding/work_queues.py",
        (("self._word, self._queue = there, found", "self._word = there"),),
    ),
    Mutant(
        "balance-who-lists-microbatches-is-infinitely-fast",
        "A rank that asks for microbatches ahead of computing them takes samples as one that is through with them. One rank gets most of the work of all.",
        ("tests/balance/test_balance_late_loaders.py::test_who_reads_ahead_takes_nothing_and_is_told",),
        "balance/late_binding/work_queues.py",
        (("self._takes = False", "self._takes = True"),),
    ),
    Mutant(
        "balance-workers-share-an-iterable-wrongly",
        "With several workers and ranks two of them take the same samples of an iterable, and some are taken by nobody. No error: an epoch has the right number of samples.",
        ("tests/balance/test_balance_stream_iterables.py",),
        "balance/data/samples.py",
        (
            (
                "first, every = worker * self.world_size + self.rank, num_workers * self.world_size",
                "first, every = worker + self.rank, num_workers * self.world_size",
            ),
        ),
    ),
    Mutant(
        "engines-memory-is-taken-over-without-a-wait",
        "A stream that takes over memory from another one does not wait until that one is done with it. On a GPU pushes of two streams overtake each other, and one is read before it is written.",
        ("tests/cuda/test_cuda_engine_streams.py::test_order",),
        "odc/engines/cuda.py",
        (
            (
                "if end is not None and handle != stream.cuda_stream:",
                "if end is not None and handle == stream.cuda_stream:",
            ),
        ),
    ),
    Mutant(
        "engines-more-than-63-slots-overwrite-the-sum",
        "Where a sum takes more slots than one launch can add, each launch overwrites what the one before has added. With 32 ranks and more on a host the gradients of the first ones are missing.",
        ("tests/cuda/test_cuda_engine.py::test_more_slots_than_one_launch_adds",),
        "odc/engines/cuda.py",
        (
            (
                "is_first = addition.first and not any(slot < low for slot in addition.slots)",
                "is_first = addition.first",
            ),
        ),
    ),
    Mutant(
        "fsdp-a-collective-of-a-publication-is-the-scripts",
        "A collective inside fsdp_pre_all_gather is taken for one of the script, before which changes are published. A unit is published while it is being published.",
        ("tests/fsdp/test_all_gather_extensions.py::test_what_is_said_is_done_where_that_communicates",),
        "fsdp_patch/gradient_use.py",
        (
            (
                "if tensors is None and is_first and not (self.is_computing or _is_any_publishing()):",
                "if tensors is None and is_first and not self.is_computing:",
            ),
        ),
    ),
    Mutant(
        "fsdp-a-dimension-of-all-ranks-is-not-known",
        "Partners are looked for by what groups are called, and the default group is not called after a dimension. Where all ranks share each sample, one with fewer microbatches leaves the others waiting until their limit.",
        ("tests/fsdp/test_context_parallel.py::test_who_leaves_the_others_of_a_sample_is_named",),
        "fsdp_patch/patching.py",
        (("for name, group in (*_described(), *_dimensions(units)):", "for name, group in _described():"),),
    ),
    Mutant(
        "fsdp-a-fence-publishes-some-where-all-must",
        "Behind a fence a rank leaves out a unit that it has not changed, though to publish it is collective. Another rank, which has, waits for it, or sums something else.",
        ("tests/fsdp/test_all_gather_extensions.py::test_changes_between_steps_are_published_anew",),
        "fsdp_patch/publishing.py",
        (("if i in changed or u.communicates or", "if i in changed or"),),
    ),
    Mutant(
        "fsdp-a-norm-is-of-one-ranks-parts",
        "A step by unit clips by the norm of this rank's parts of the gradients, and not by that of all. Ranks scale their shards differently: the model is not what one step makes of it.",
        ("tests/fsdp/test_step_by_unit.py::test_the_numbers_are_those_of_one_process_whatever_each_rank_has",),
        "fsdp_patch/unit_steps.py",
        (("for group in groups:", "for group in groups[:0]:"),),
    ),
    Mutant(
        "fsdp-a-part-cleared-throws-all-away",
        "Who clears a part of the gradients between backward and step throws the whole minibatch away. The step trains nothing, and nobody is told.",
        ("tests/fsdp/test_fsdp2_scripts.py::test_a_part_of_the_gradients_that_others_have_added_up_cannot_be_cleared",),
        "fsdp_patch/gradient_use.py",
        (("if sent and sent <= owned:", "if sent & owned:"),),
    ),
    Mutant(
        "fsdp-a-scale-that-was-set-is-not-seen",
        "A scale that a script has computed behind its step, and set at the weights, is no change of these. The next minibatch is refused, or the other ranks compute with the former scale.",
        ("tests/fsdp/test_all_gather_extensions.py::test_changes_between_steps_are_published_anew",),
        "fsdp_patch/guard.py",
        (
            (
                """            and all([trace.has_same_attributes() for trace in self._with_attributes])  # noqa: C419 (mostly none)
        )""",
                "        )",
            ),
        ),
    ),
    Mutant(
        "fsdp-a-turn-leaves-its-gradient",
        "A step by unit does not free the gradient of a unit before it makes the next one. At the end of the minibatch there are those of the whole model, which is what the script wanted to do without.",
        ("tests/fsdp/test_step_by_unit.py::test_there_is_never_more_than_the_gradient_of_one_unit",),
        "fsdp_patch/publishing.py",
        (
            (
                """                    unit.clear_gradients()
                    self._publisher.gradients.clear(self._publisher.trainable[index])""",
                "                    self._publisher.gradients.clear(self._publisher.trainable[index])",
            ),
        ),
    ),
    Mutant(
        "fsdp-a-unit-is-published-after-half-a-step",
        "A unit that two optimizers share is published when the first of them has stepped. The step of the second one ends a minibatch of its own: each step synchronizes twice, and a fast rank may read between.",
        ("tests/fsdp/test_fsdp2_features.py::test_two_optimizers_publish_once_both_have_stepped",),
        "fsdp_patch/publishing.py",
        (
            (
                "and (trainable <= self.gradients.stepped or",
                "and (trainable & self.gradients.stepped or",
            ),
        ),
    ),
    Mutant(
        "fsdp-an-end-without-gradients-begins-anew",
        "A minibatch that no rank had gradients of takes away what was used before it. A rank without a microbatch steps on old gradients where the others step on those of the next minibatch.",
        ("tests/fsdp/test_gradient_state.py",),
        "fsdp_patch/gradient_state.py",
        (("        if not self.was_empty:\n", "        if True:\n"),),
    ),
    Mutant(
        "fsdp-discarded-gradients-are-used",
        "What is thrown away by discard() is in .grad all the same. The next step trains with the gradients of a minibatch that the script has given up (a loss that is not finite).",
        ("tests/fsdp/test_interruptions.py::test_a_backward_that_did_not_complete_can_be_discarded[fsdp2]",),
        "fsdp_patch/session.py",
        (
            (
                "without = self._turns.take(step) if kind is EndKind.USE else self._units",
                "without = self._turns.take(step) if kind is not EndKind.FENCE else self._units",
            ),
        ),
    ),
    Mutant(
        "fsdp-gradients-go-to-counterparts-of-another-host",
        "Where ranks of a host share, what is pushed for the parameters of one host lies where those of another one belong. All hosts train their parameters with other parameters' gradients.",
        ("tests/fsdp/test_shared_in_host.py::test_uneven_ranks_have_the_numbers_of_one_process",),
        "fsdp_patch/sharing.py",
        (("for home in self._homes for part in whole", "for home in self._homes[::-1] for part in whole"),),
    ),
    Mutant(
        "fsdp-shared-parameters-are-published-too-early",
        "Where ranks of a host share, parameters are published before those of the counterparts have arrived. Each host computes with what the others had before.",
        ("tests/fsdp/test_shared_in_host.py::test_parameters_that_change_between_steps_cross_again",),
        "fsdp_patch/unit.py",
        (('        self.replicas.wait(arriving, f"parameters of {self.name!r}")\n', "        pass\n"),),
    ),
    Mutant(
        "fsdp-fsdp1-kept-gradients-are-replaced",
        "Under FSDP1 the gradients of a minibatch replace those that the script has kept from the one before. Gradient accumulation over several minibatches trains with the last one only.",
        ("tests/fsdp/test_ways_out.py::test_nobody_waits_for_a_rank_on_its_way[kept-1]",),
        "fsdp_patch/fsdp1.py",
        (("flat.grad.add_(mean.to(shard.device))", "flat.grad.copy_(mean.to(shard.device))"),),
    ),
    Mutant(
        "fsdp-fsdp1-own-row-is-taken-for-there",
        "FSDP1 does not put its own shard into what is gathered, FSDP2 does; here it is taken for there. Each rank computes with whatever lay in memory in the place of its own parameters.",
        ("tests/fsdp/test_ways_out.py::test_nobody_waits_for_a_rank_on_its_way[kept-1]",),
        "fsdp_patch/fsdp1.py",
        (
            (
                "communication.gather(index, padded_unsharded_flat_param, own_in_place=False)",
                "communication.gather(index, padded_unsharded_flat_param, own_in_place=True)",
            ),
        ),
    ),
    Mutant(
        "fsdp-gradients-are-taken-in-another-order",
        "Gradients are pushed in an order of their own, not in that of the sums. Parameters of equal size get each other's gradients, and nothing else notices.",
        ("tests/fsdp/test_fsdp2_parity.py",),
        "fsdp_patch/fsdp2_in_place.py",
        (
            (
                "for param, grad in here[: -len(small) or None]:",
                "for param, grad in reversed(here[: -len(small) or None]):",
            ),
        ),
    ),
    Mutant(
        "fsdp-gradients-of-before-a-discarded-minibatch-are-not-kept",
        "What stands in .grad of an expert that one rank has for itself, before a minibatch that is thrown away, is not copied. Where gradients are cleared in place, those of the discarded minibatch are used in the next step.",
        ("tests/fsdp/test_several_meshes.py::test_of_a_discarded_minibatch_nothing_remains_on_any_mesh",),
        "fsdp_patch/unit.py",
        (
            (
                "self._before = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters]",
                "self._before = [None if p.grad is None else p.grad.detach() for p in self._parameters]",
            ),
        ),
    ),
    Mutant(
        "fsdp-half-a-backward-is-used",
        "A backward that an exception has ended, after some units had sent their gradients, is not noticed. A step uses gradients of which half the layers are missing.",
        (
            "tests/fsdp/test_interruptions.py::test_a_backward_that_did_not_complete_is_not_used[fsdp2-bare-root-nothing]",
        ),
        "fsdp_patch/fsdp2_unit.py",
        (
            (
                "return bool(is_waiting) and (self._has_sent or any(have_gradients(self.params)))",
                "return bool(is_waiting) and any(have_gradients(self.params))",
            ),
        ),
    ),
    Mutant(
        "fsdp-metadata-are-those-of-the-first-publication",
        "Full weights are made with the scale of the first publication for ever. After a few steps, weights in float8 are a little larger or smaller than they are.",
        ("tests/fsdp/test_all_gather_extensions.py::test_four_ranks_of_which_two_are_idle",),
        "fsdp_patch/fsdp2_extension.py",
        (
            (
                "self._metadata, self._sizes = data.all_gather_metadata, data.all_gather_input_sizes",
                "self._metadata, self._sizes = self._metadata or data.all_gather_metadata, data.all_gather_input_sizes",
            ),
        ),
    ),
    Mutant(
        "fsdp-one-changed-unit-stays-as-it-was",
        "Behind a fence the first of the changed units is not written. The others compute with what it was.",
        ("tests/fsdp/test_changing_scripts.py::test_what_is_changed_between_steps_is_what_all_ranks_compute_with",),
        "fsdp_patch/publishing.py",
        (
            (
                "if i in changed or u.communicates or",
                "if i in list(changed)[1:] or u.communicates or",
            ),
        ),
    ),
    Mutant(
        "fsdp-padding-is-not-skipped",
        "In the sum of a unit each parameter is looked for right behind the one before, without the padding of its shard. Where a parameter cannot be cut evenly, the last rank trains the next ones with shifted gradients.",
        ("tests/fsdp/test_fsdp2_parity.py::test_different_modules_per_rank_and_microbatch_match_one_float64_process",),
        "fsdp_patch/fsdp2_unit.py",
        (("offset += param.numel", "offset += param.local.numel()"),),
    ),
    Mutant(
        "fsdp-partners-count-one-group-only",
        "Partners tell each other how many collectives they have entered in their own group, not in those around it. One that waits in a collective of the script, after fewer microbatches than the others, is not named.",
        ("tests/fsdp/test_context_parallel.py::test_who_leaves_the_others_of_a_sample_is_named",),
        "fsdp_patch/patching.py",
        (
            (
                "return [(group, _counter([group, *_around(group)])) for group in once.values()]",
                "return [(group, _counter([group])) for group in once.values()]",
            ),
        ),
    ),
    Mutant(
        "fsdp-replicas-are-not-divided-by",
        "With replicas (HSDP) gradients are divided by the ranks of a shard group, and not by all. They are too large by the number of replicas: clipping hides it, a learning rate does not.",
        ("tests/fsdp/test_fsdp2_scripts.py::test_hybrid_sharding_over_two_hosts",),
        "fsdp_patch/fsdp2_unit.py",
        (
            (
                "return self.shard_group.size() * (self.copy_group.size() if self.copy_group else 1)",
                "return self.shard_group.size()",
            ),
        ),
    ),
    Mutant(
        "fsdp-replicas-sum-twice",
        "With replicas (HSDP) and a norm, a step by unit sums each gradient over the replicas for the norm, and again for the step. The sum lies in place: the gradients of the step are too large by the number of replicas.",
        ("tests/fsdp/test_fsdp2_scripts.py::test_hybrid_sharding_over_two_hosts",),
        "fsdp_patch/publishing.py",
        (("self._kept[index] = found", "self._kept.pop(index, None)"),),
    ),
    Mutant(
        "fsdp-small-parameters-stay-as-they-were",
        "What was gathered into one buffer for the small parameters of a unit is not handed out. Biases and norms keep what their memory held before: wrong from the first forward on.",
        ("tests/fsdp/test_fsdp2_parity.py",),
        "fsdp_patch/fsdp2_in_place.py",
        (("torch.split_with_sizes_copy(self._small_rows, sizes, dim=1, out=outs)", "_ = sizes, outs"),),
    ),
    Mutant(
        "fsdp-steps-are-not-compared",
        "Ranks that have taken different numbers of steps are not refused at the next end of a minibatch. One has stepped where another one has kept its gradients: parameters drift apart without a word.",
        (
            "tests/liveness/test_faults_steps.py::test_ranks_that_step_on_gradients_of_different_minibatches_are_told[fsdp2-steps_alone]",
        ),
        "fsdp_patch/gradient_state.py",
        (("if least.num_steps != most.num_steps:", "if least.num_steps > most.num_steps:"),),
    ),
    Mutant(
        "fsdp-the-guard-looks-at-one-parameter-less",
        "Before a push the guard does not look whether the first parameter of the unit was changed. A script that changes it between microbatches computes with other weights than the other ranks.",
        ("tests/fsdp/test_guard_comparison.py::test_before_a_push_every_parameter_of_the_unit_is_looked_at",),
        "fsdp_patch/guard.py",
        (
            (
                "self._counted = list({id(tensor): tensor for trace in traces for tensor in trace.counted}.values())",
                "self._counted = list({id(tensor): tensor for trace in traces[1:] for tensor in trace.counted}.values())",
            ),
            (
                "self._sample = [view for trace in traces for view in trace.sample]",
                "self._sample = [view for trace in traces[1:] for view in trace.sample]",
            ),
        ),
    ),
    Mutant(
        "fsdp-touched-flags-are-ignored",
        "A parameter that no microbatch has used gets a gradient of zeros in place of None. Weight decay and momentum move it.",
        ("tests/fsdp/test_fsdp2_features.py::test_what_nobody_uses_keeps_grad_none_so_that_weight_decay_skips_it",),
        "fsdp_patch/fsdp2_unit.py",
        (("if here and (one is None or one.was_there):", "if one is None or one.was_there:"),),
    ),
    Mutant(
        "fsdp-unsent-gradients-are-dropped",
        "Gradients of microbatches under no_sync() that no later one has sent are not refused. They are in no step, or in a later one.",
        ("tests/fsdp/test_interruptions.py::test_gradients_that_were_not_sent_are_refused[fsdp2-False]",),
        "fsdp_patch/fsdp2_unit.py",
        (
            (
                """        if any(touched) and self.holds_unsent:
            raise waiting_gradients(self.name)
        self._touched = touched""",
                "        self._touched = touched",
            ),
        ),
    ),
    Mutant(
        "fsdp-what-is-cleared-twice-is-not-installed",
        "A script sets a .grad to None that was None, and pending. The gradient that other ranks bring of it is dropped without a word.",
        ("tests/fsdp/test_gradient_state.py", "tests/fsdp/test_pending.py"),
        "fsdp_patch/pending.py",
        (
            (
                "self.was_there, base = self.is_there or (self.is_cleared and not self.pending.is_sent), self.pending.base",
                "self.was_there, base = self.is_there, self.pending.base",
            ),
        ),
    ),
    Mutant(
        "fsdp-what-is-written-elsewhere-is-not-published-anew",
        "A rank that finds its own part of a written parameter equal publishes nothing anew, though others do. A clamp of one scalar ends the job.",
        ("tests/fsdp/test_changing_scripts.py::test_what_is_changed_between_steps_is_what_all_ranks_compute_with",),
        "fsdp_patch/guard.py",
        (("elif self.is_any_written([index]) or self.is_any_changed([index]):", "elif self.is_any_changed([index]):"),),
    ),
    Mutant(
        "fsdp-what-was-used-is-forgotten-behind-finish",
        "session.finish() behind a step ends a minibatch without gradients. On a rank without a microbatch the next step uses the old ones again.",
        ("tests/fsdp/test_gradient_state.py",),
        "fsdp_patch/session.py",
        (("        self._publisher.gradients.leave(self._publisher.all_trainable)\n", ""),),
    ),
    Mutant(
        "fsdp-who-kept-and-who-changed-is-not-compared",
        "A rank that has changed parameters by hand is not told from those that went on with the former ones. One rank computes with old parameters of another, and its gradients get into a step.",
        ("tests/fsdp/test_ways_out.py::test_parameters_changed_by_hand_on_one_rank_only_get_into_no_step",),
        "fsdp_patch/gradient_state.py",
        (
            (
                "kept = next((notes for notes in said if notes.said & Said.KEPT), None)",
                "kept = next((notes for notes in said if notes.said & Said.CHANGED and notes.said & Said.KEPT), None)",
            ),
        ),
    ),
    Mutant(
        "items-halves-are-swapped",
        "A round waits for the readers of the other half of the memory, and overwrites its own half unread. A slow reader gets items of two rounds later.",
        (
            "tests/items/test_items.py::test_the_adversaries_alone_break_nothing",
            "tests/items/test_items.py::test_every_read_sees_what_was_published_for_it",
        ),
        "odc/items/channel.py",
        (("self._halves.get(half),", "self._halves.get(1 - half),"),),
    ),
    Mutant(
        "items-parts-without-items-are-counted",
        "A part that has no items, and may be left out, is counted as a publication. Readers wait for one that never comes, until the time limit.",
        ("tests/items/test_items.py::test_one_rank_reads_its_own_and_waits_for_nobody",),
        "odc/items/routes.py",
        (("posts[producer] += bool(part)", "posts[producer] += 1"),),
    ),
    Mutant(
        "items-read-one-part-too-early",
        "An item is read when the part before it was published. The language model computes with what lay there before: the outputs of other images.",
        (
            "tests/items/test_items.py::test_the_adversaries_alone_break_nothing",
            "tests/items/test_items.py::test_every_read_sees_what_was_published_for_it",
        ),
        "odc/items/channel.py",
        (
            (
                "return self.count(rank, Signal.PUBLISHED) >= count",
                "return self.count(rank, Signal.PUBLISHED) >= count - 1",
            ),
        ),
    ),
    Mutant(
        "items-routes-are-not-compared",
        "Of the routes of another rank only the number of the round is looked at. Ranks whose routes differ read each other's items at the wrong places, without an error.",
        ("tests/items/test_items_growing.py::test_other_routes_are_found_before_a_byte_is_used",),
        "odc/items/channel.py",
        (("if found != expected:", "if found[0] != expected[0]:"),),
    ),
    Mutant(
        "items-words-are-overwritten-too-early",
        "A rank writes the words of a round over those of four rounds ago without waiting for their readers (off by one). A slow reader is told of different routes where there are none.",
        ("tests/items/test_items.py::test_words_of_a_round_stay_until_its_readers_have_looked",),
        "odc/items/channel.py",
        (("long_ago = self.rounds.get(number - RING)", "long_ago = self.rounds.get(number - RING - 1)"),),
    ),
    Mutant(
        "kernels-the-last-element-is-not-added",
        "What is copied and added leaves out the last element where their number is no multiple of a vector (off by one). On a GPU one element of each unit lacks the gradients of all clients but the first.",
        ("tests/kernels/test_kernels_interpreted.py::TestAccumulate::test_sizes_and_alignments",),
        "kernels/launching.py",
        (
            (
                "_put(target + rest, last.to(DTYPE), rest < numel, HOW)",
                "_put(target + rest, last.to(DTYPE), rest < numel - 1, HOW)",
            ),
        ),
    ),
    Mutant(
        "kernels-the-wrong-row-is-left-as-it-is",
        "The gather begins with its own rank, so that with own_in_place the row of the last one is not read. On a GPU each rank computes with old parameters of its neighbour.",
        ("tests/kernels/test_kernels_parts.py::TestGather::test_own_row_in_place",),
        "kernels/parts.py",
        (("rank + first, rank + first - world_size)", "rank + first, rank + first - world_size) - 1"),),
    ),
    Mutant(
        "launch-microbatches-without-a-push-are-forgotten",
        "The time of forwards whose gradients a later one sends along is left out of the report. With gradient accumulation it states a fraction of the savings.",
        ("tests/launch/test_launch_meter.py::test_forwards_before_a_push_are_one_microbatch",),
        "launch/report.py",
        (("self._current.append(self._unpushed_s + elapsed_s)", "self._current.append(elapsed_s)"),),
    ),
    Mutant(
        "launch-minibatches-are-compared-from-the-first",
        "The report compares the n-th minibatch that each rank has kept, also where some have dropped their first ones. Of long runs it states savings that there were not.",
        ("tests/launch/test_launch_report.py::test_minibatches_are_aligned_from_the_end",),
        "launch/report.py",
        (
            (
                "minibatch = [times[len(times) - count + index] for times in ranks]",
                "minibatch = [times[index] for times in ranks]",
            ),
        ),
    ),
    Mutant(
        "liveness-a-wait-forgets-deaths",
        "A wait looks whether a rank has closed, and not whether it is dead. Where a rank is killed the others wait for the whole time limit, ten minutes.",
        (
            "tests/liveness/test_faults.py::test_a_rank_that_is_hurt_is_named_by_all_others[rank 1-scatter.added-kill-endless]",
        ),
        "odc/rank/waiting.py",
        (
            (
                "if transport.peers.by_rank[rank].state is PeerState.ALIVE:",
                "if transport.peers.by_rank[rank].state is not PeerState.CLOSED:",
            ),
        ),
    ),
    Mutant(
        "liveness-notice-is-not-passed-on",
        "What a rank hears of a failure in its shard group is not told to its replicas. They wait for a rank that does not come until the time limit, and then blame the wrong one.",
        (
            "tests/liveness/test_waiting.py::test_what_one_group_has_told_is_told_to_the_other_while_the_script_computes",
        ),
        "odc/rank/watchdog.py",
        (
            (
                """            self._job.abort(notice)  # of the other group; who has one keeps the first
        if notice is None and self._failure.error is None:""",
                "        if notice is None and self._failure.error is None:",
            ),
        ),
    ),
    Mutant(
        "liveness-the-nearest-rank-is-to-blame",
        "A rank that waits itself is blamed in place of the one that it waits for. Where one rank hangs in a chain of waits nobody is ever found, or the wrong one.",
        ("tests/liveness/test_waiting.py",),
        "odc/rank/waiting.py",
        (("blamed = max(chain, key=lambda one: silences[one] - self.limit_s(one))", "blamed = chain[0]"),),
    ),
    Mutant(
        "liveness-who-waits-is-never-silent",
        "A rank that says that it waits is never called silent. One that is stopped in a wait says so for good: others take it for a circle of ranks that wait for each other, and name no cause.",
        (
            "tests/liveness/test_faults.py::test_a_rank_that_is_hurt_is_named_by_all_others[rank 1-wait-stop-waits_for_rank_0]",
        ),
        "odc/rank/waiting.py",
        (
            (
                "(limits.STATUS_LAG_S if self._job.peer(rank).waiting_on is not None else 0.0)",
                "(1e9 if self._job.peer(rank).waiting_on is not None else 0.0)",
            ),
        ),
    ),
    Mutant(
        "liveness-who-has-been-in-a-collective-is-said-to-be-missing-in-it",
        "A rank that has left a collective of all ranks, and waits for one that is still in it, says that both wait for good. A job ends where a large broadcast takes its time.",
        (
            "tests/liveness/test_waiting.py::test_a_rank_that_waits_for_this_one_in_a_collective_of_all_is_not_waited_for",
        ),
        "odc/rank/waiting.py",
        (("return 0 < ahead < IN_COLLECTIVE // 2", "return ahead < IN_COLLECTIVE // 2"),),
    ),
    Mutant(
        "minibatch-a-collective-outside-is-taken-for-one-inside",
        "A partner that waits in a collective between two microbatches is taken for one that has left this rank alone. A script that logs in each microbatch ends with an error as soon as one of its ranks is slow.",
        ("tests/fsdp/test_context_parallel.py::test_nobody_is_named_who_logs_between_microbatches",),
        "odc/minibatch/partners.py",
        (
            (
                "return look.before == self._before_microbatch and look.before < counts[0] <= look.entered[0]",
                "return look.before == self._before_microbatch and counts[0] <= look.entered[0]",
            ),
        ),
    ),
    Mutant(
        "minibatch-a-fence-is-that-of-one-mesh",
        "Where units are on several meshes, changed parameters are published as soon as the ranks of the first one have come. A rank of another mesh reads changed parameters in the minibatch before the change.",
        ("tests/minibatch/test_joint.py::test_a_fence_is_over_when_the_ranks_of_all_meshes_have_come",),
        "odc/minibatch/fences.py",
        (
            (
                "return next((mesh for mesh in runtime.meshes if mesh._protocol.late()), None)",
                "return runtime if runtime._protocol.late() else None",
            ),
        ),
    ),
    Mutant(
        "minibatch-a-later-minibatch-is-accepted",
        "A sum accepts pushes of its minibatch and of all before it (>= in place of ==). A gradient of the last step is added to this one.",
        ("tests/liveness/test_faults_pushes.py::test_a_push_of_another_minibatch_is_refused_and_changes_no_sum",),
        "odc/minibatch/accumulators.py",
        (("if accepted == minibatch and accepted > 0:", "if accepted >= minibatch and accepted > 0:"),),
    ),
    Mutant(
        "minibatch-end-forgets-the-daemon",
        "On a CPU the sums are taken when all ranks have sent their pushes, and not when these are added. Gradients of the last microbatches are missing in the step, now and then.",
        (
            "tests/minibatch/test_protocol.py::test_every_gather_sees_its_version_and_every_push_counts_once",
            "tests/minibatch/test_protocol.py::test_the_adversary_alone_breaks_nothing",
        ),
        "odc/minibatch/protocol.py",
        (
            (
                """        if self._daemon is not None:
            self._daemon.finish([words[self._end_at(rank) + _SENT] for rank, words in enumerate(self._ends_of)])""",
                """        if self._daemon is not None and self._has_streams:
            self._daemon.finish([words[self._end_at(rank) + _SENT] for rank, words in enumerate(self._ends_of)])""",
            ),
        ),
    ),
    Mutant(
        "minibatch-end-waits-for-one-rank-less",
        "The end of a minibatch does not wait for the rank behind this one. Its last pushes come too late for the step, or an error names a rank that did nothing wrong.",
        ("tests/minibatch/test_protocol.py::test_the_adversary_alone_breaks_nothing",),
        "odc/minibatch/protocol.py",
        (
            (
                "return [rank for rank in self._rotation if count(rank, done) < minibatch]",
                "return [rank for rank in self._rotation[1:] if count(rank, done) < minibatch]",
            ),
        ),
    ),
    Mutant(
        "minibatch-ends-are-those-of-the-first-mesh",
        "Where units are on several meshes, only what ranks of the first one say at the end of a minibatch is heard. Who keeps gradients, or changes parameters, on another mesh is not found to differ.",
        ("tests/minibatch/test_joint.py::test_versions_and_sums_are_those_of_the_minibatch_on_every_mesh",),
        "odc/minibatch/runtime.py",
        (
            (
                "return [end for protocol in self._protocol.meshes for end in protocol.ends]",
                "return self._protocol.ends",
            ),
        ),
    ),
    Mutant(
        "minibatch-ends-of-two-minibatches-share-a-place",
        "What a rank says of its end is written where its words of the minibatch before lie. A slow rank reads those of the next minibatch: an error for nothing, or the wrong answer.",
        ("tests/minibatch/test_protocol.py::test_what_a_rank_says_of_its_end_stays_until_all_have_looked",),
        "odc/minibatch/protocol.py",
        (
            (
                "return (number % 2 * self.world_size + rank) * _END_WORDS",
                "return (number % 1 * self.world_size + rank) * _END_WORDS",
            ),
        ),
    ),
    Mutant(
        "minibatch-ends-on-other-meshes-are-not-awaited",
        "Where units are on several meshes, a minibatch ends when the ranks of the first one are done with it. The step is taken without gradients that ranks of another mesh have yet to push.",
        ("tests/minibatch/test_joint.py::test_versions_and_sums_are_those_of_the_minibatch_on_every_mesh",),
        "odc/minibatch/protocol.py",
        (
            (
                """        for one in self.meshes:
            one._await_done()""",
                "        self._await_done()",
            ),
        ),
    ),
    Mutant(
        "minibatch-first-push-of-a-run-alone-overwrites",
        "Only the first push of a run overwrites a sum; the first one of a later minibatch is added to the old sum. Every step uses all gradients since the beginning.",
        ("tests/minibatch/test_accumulators.py::test_sums_equal_an_independent_sum",),
        "odc/minibatch/accumulators.py",
        (("first = pushed.units[unit] != minibatch", "first = not pushed.units[unit]"),),
    ),
    Mutant(
        "minibatch-gathers-accept-the-version-before",
        "A wait for a signal of minibatch k is content with that of k - 1. A fast rank computes with old parameters, or pushes where the owner has not taken its sums.",
        ("tests/minibatch/test_protocol.py::test_the_adversary_alone_breaks_nothing",),
        "odc/minibatch/protocol.py",
        (
            (
                "late = [owner for owner in owners if count(owner, signal) < number]",
                "late = [owner for owner in owners if count(owner, signal) < number - 1]",
            ),
        ),
    ),
    Mutant(
        "minibatch-a-push-in-bf16-is-first-twice",
        "Pushes of one minibatch that arrive together, some in bf16 and some in float32, are written to the sum once for each dtype instead of added: gradients of the first ones are lost.",
        ("tests/minibatch/test_parts.py::test_pushes_of_two_dtypes_that_arrive_together_are_added",),
        "odc/minibatch/accumulators.py",
        (
            (
                "                is_first = own.pushed[number].units[unit] != group[0].minibatch\n",
                "                is_first = True\n",
            ),
        ),
    ),
    Mutant(
        "engines-copies-begin-at-the-first-slice",
        "What copy engines gather of a parameter begins where the unit's shard does: large parameters have values of others.",
        ("tests/cuda/test_cuda_engine.py::test_the_table_of_transfers_decides_of_each_part",),
        "odc/engines/cuda.py",
        (
            (
                "[sources[owner] + offset for owner in owners for _, offset, _ in copies]",
                "[sources[owner] for owner in owners for _, offset, _ in copies]",
            ),
        ),
    ),
    Mutant(
        "minibatch-kept-pushes-are-forgotten",
        "Pushes that a client keeps while an owner is stuck are not sent at the end of the minibatch. On a GPU with a collective of the script in between, microbatches are missing in the step.",
        ("tests/minibatch/test_deadlocks.py::test_pushes_that_find_no_slot_are_kept_and_come_in_later",),
        "odc/minibatch/protocol.py",
        (
            (
                """        if self._daemon is not None:
            self._daemon.drain()
        self._faults.hit("finish.before_done")""",
                '        self._faults.hit("finish.before_done")',
            ),
        ),
    ),
    Mutant(
        "minibatch-other-meshes-are-not-closed",
        "Where units are on several meshes, a session that is closed closes the transport of the first one only. Ranks of the others are not told, and its memory lasts until garbage is collected.",
        ("tests/minibatch/test_joint.py::test_versions_and_sums_are_those_of_the_minibatch_on_every_mesh",),
        "odc/minibatch/runtime.py",
        (
            (
                "return [self._transport, *self._beside, *(each for one in self._others for each in one._transports())]",
                "return [self._transport, *self._beside]",
            ),
        ),
    ),
    Mutant(
        "minibatch-own-row-is-left-out",
        "With deterministic=True an owner leaves out what it has pushed itself. Gradients are those of the other ranks: no error, slower progress.",
        ("tests/minibatch/test_protocol.py::test_the_adversary_alone_breaks_nothing",),
        "odc/minibatch/accumulators.py",
        (
            (
                "        clients = [client for client, pushed in enumerate(sums.pushed) if pushed.units[unit] == minibatch]",
                """        clients = [
            client
            for client, pushed in enumerate(sums.pushed)
            if pushed.units[unit] == minibatch and client != self._rank
        ]""",
            ),
        ),
    ),
    Mutant(
        "minibatch-parts-go-to-the-next-rank",
        "A push in parts gives each owner the rows of the owner after it. Every shard gets the gradient of another one.",
        ("tests/fsdp/test_fsdp2_parity.py",),
        "odc/minibatch/protocol.py",
        (
            (
                "add(owner, unit, rows[owner], layout, minibatch)",
                "add(owner, unit, rows[(owner + 1) % self.world_size], layout, minibatch)",
            ),
        ),
    ),
    Mutant(
        "minibatch-published-before-it-is-written",
        "A shard is announced before it is written. Other ranks compute with parameters of which a part is of the minibatch before: no error, another loss.",
        ("tests/minibatch/test_protocol.py::test_what_a_signal_says_is_true_when_it_is_posted",),
        "odc/minibatch/protocol.py",
        (
            (
                "        if fill is not None:",
                """        self._end.transport.post(unit)
        if fill is not None:""",
            ),
            (
                """        self._end.transport.post(unit)
        self._end.transport.peers.tick()""",
                "        self._end.transport.peers.tick()",
            ),
        ),
    ),
    Mutant(
        "minibatch-slot-is-filled-before-it-is-empty",
        "A client fills a slot whose former push its owner has yet to add (off by one). A slow owner adds one push twice and another one never, or refuses it.",
        ("tests/minibatch/test_arrivals.py",),
        "odc/minibatch/daemon.py",
        (
            (
                "needed, signal = self._sent + 1 - NUM_SLOTS, self._acked_at + self._rank",
                "needed, signal = self._sent - NUM_SLOTS, self._acked_at + self._rank",
            ),
        ),
    ),
    Mutant(
        "minibatch-slot-is-given-back-before-it-is-added",
        "The daemon acknowledges a push before it has added it. The client fills the slot meanwhile, and a part of the next gradient is added in its place.",
        ("tests/minibatch/test_accumulators.py::test_a_slot_is_given_back_when_its_push_has_been_added",),
        "odc/minibatch/daemon.py",
        (
            (
                "        self._store.add_arrived(arrived, self._slots.local, self._slot_bytes)",
                """        self._transport.acknowledge([(self._acked_at + client, client) for client in clients])
        self._store.add_arrived(arrived, self._slots.local, self._slot_bytes)""",
            ),
            (
                """            self._handled[client] += 1
        self._transport.acknowledge([(self._acked_at + client, client) for client in clients])""",
                "            self._handled[client] += 1",
            ),
        ),
    ),
    Mutant(
        "minibatch-sums-are-opened-after-it-was-told",
        "The other ranks are told that sums are open before the last one is. A fast rank's first push is refused now and then, or added to a sum that is then cleared.",
        ("tests/minibatch/test_protocol.py::test_what_a_signal_says_is_true_when_it_is_posted",),
        "odc/minibatch/protocol.py",
        (
            (
                """        self._store.open(unit, self.state.coming)  # before anybody is told: see PROTOCOL.md
        if self.state.open(unit):
            self._end.transport.post(self._open)""",
                """        if self.state.open(unit):
            self._end.transport.post(self._open)
        self._store.open(unit, self.state.coming)  # before anybody is told: see PROTOCOL.md""",
            ),
        ),
    ),
    Mutant(
        "minibatch-sums-stay-open-after-the-end",
        "The owner does not close its sums when they are final. A push that comes late (a bug elsewhere, a retried message) changes gradients that are in use, without an error.",
        (
            "tests/liveness/test_faults_pushes.py::test_a_push_that_comes_after_the_end_does_not_change_gradients_that_are_in_use",
        ),
        "odc/minibatch/protocol.py",
        (
            (
                """        self._store.close(self.state.minibatch)
        self.state.finish()""",
                "        self.state.finish()",
            ),
        ),
    ),
    Mutant(
        "minibatch-the-lock-is-not-awaited",
        "Who finds the lock of a sum taken adds all the same. Two clients that add at once lose a part of a gradient, rarely, under load.",
        ("tests/minibatch/test_accumulators.py::test_who_finds_the_lock_of_a_sum_taken_waits_for_it",),
        "odc/minibatch/accumulators.py",
        (
            (
                """        if not self.is_per_client and not block.try_lock(unit, self._rank):
            self._await_lock(owner, unit)""",
                "        _ = self.is_per_client or block.try_lock(unit, self._rank)",
            ),
        ),
    ),
    Mutant(
        "minibatch-two-ways-to-end-are-one-too-few",
        "Ranks that end a minibatch in two different ways (a step here, a discard there) are not refused. The ranks' parameters drift apart without a word.",
        ("tests/minibatch/test_protocol.py::test_ranks_that_end_a_minibatch_in_different_ways_fail_at_once",),
        "odc/minibatch/protocol.py",
        (("if len(kinds) > 1:", "if len(kinds) > 2:"),),
    ),
    Mutant(
        "minibatch-what-a-first-push-lacks-keeps-the-old-sum",
        "Where the first push of a minibatch holds some parameters only, the sums of the others keep what was there. A parameter that is used by a later microbatch gets a part of the gradient of the step before.",
        ("tests/minibatch/test_accumulators.py::test_sums_equal_an_independent_sum",),
        "odc/minibatch/accumulators.py",
        (
            (
                "for offset, numel in gaps if first else ():",
                "for offset, numel in gaps if None else ():",
            ),
        ),
    ),
    Mutant(
        "minibatch-who-alone-has-changed-parameters-waits",
        "A rank that alone has changed a frozen model waits for the others, which wait for it. Nobody is told.",
        ("tests/fsdp/test_changes_on_some_ranks.py::test_a_change_that_one_rank_leaves_out_is_an_error_on_all",),
        "odc/minibatch/fences.py",
        (
            (
                "if late and still_s > limits.FENCE_STUCK_S and not is_left:",
                "if late and still_s > limits.FENCE_STUCK_S * 100 and not is_left:",
            ),
        ),
    ),
    Mutant(
        "minibatch-who-waits-for-an-unseen-rank-is-taken-for-stuck",
        "In a fence, a rank that waits for one on another mesh counts as standing still, whatever that one does. A job with a slow rank fails: parameters were not changed on all ranks, it says.",
        (
            "tests/minibatch/test_joint.py::test_who_waits_in_a_fence_does_not_take_a_rank_that_it_does_not_see_for_still",
        ),
        "odc/minibatch/fences.py",
        (
            (
                "waiting |= {rank} if whom is not None and (whom >= IN_COLLECTIVE or job.sees(whom)) else set()",
                "waiting |= {rank} if whom is not None else set()",
            ),
        ),
    ),
    Mutant(
        "setup-a-refusal-is-not-told",
        "What fails on one rank in set-up is raised there at once, and not told to the others. They wait in set-up for a rank that has ended.",
        ("tests/setup/test_agreement.py::test_one_ranks_failure_is_every_ranks_error",),
        "odc/setup/agreement.py",
        (
            (
                """    result, error = _attempt(action)
    raise_together(exchange, error)""",
                """    result = action()
    raise_together(exchange, None)""",
            ),
        ),
    ),
    Mutant(
        "trainers-a-microbatch-counts-as-any-other",
        "A microbatch of pairs weighs as much as any other, however many pairs it has: TRL's mean over it is taken as it is. The loss depends on the packing.",
        ("tests/trainers/test_trainers_forms.py::test_a_process_alone_trains_the_same",),
        "trainers/trl.py",
        (('"weight": float(count > 0) if whole else count * share,', '"weight": float(count > 0),'),),
    ),
    Mutant(
        "trainers-a-rank-with-nothing-left-runs-no-row",
        "A rank of which others have taken all, or that has no share of a step, runs nothing at all. Who logs a metric waits for one that it has never had.",
        ("tests/trainers/test_trainers_late.py::test_a_rank_without_samples_runs_a_row_of_nothing",),
        "trainers/late.py",
        (("if not is_run:", "if False and not is_run:"),),
    ),
    Mutant(
        "trainers-a-resumed-epoch-skips-too-little",
        "A stream that resumes gives one placeholder per optimizer step, and not one per batch. With gradient accumulation a trainer that skips what is done skips batches that nobody has trained on.",
        ("tests/trainers/test_trainers_online.py::test_placeholders_stand_for_what_is_done",),
        "trainers/streamed.py",
        (("for _ in range(num_done * self._accumulation_steps):", "for _ in range(num_done):"),),
    ),
    Mutant(
        "trainers-first-labels-of-one-sample-are-counted",
        "Of the labels that packing has taken away only that of a row's first sample is counted. For models whose trainer counts all labels (GPT-2) the loss is divided by too few tokens.",
        ("tests/trainers/test_trainers_online.py::test_placeholders_stand_for_what_is_done",),
        "trainers/packing.py",
        (
            (
                'return sum(int((sample["labels"][:, :1] != IGNORED).sum()) for sample in samples)',
                'return sum(int((sample["labels"][:, :1] != IGNORED).sum()) for sample in samples[:1])',
            ),
        ),
    ),
    Mutant(
        "trainers-ratios-are-padded-by-0",
        'Ratios of an engine that samples are padded by 0, as everything else: "vespo" multiplies those of whole rows.',
        ("tests/trainers/test_trainers_forms.py::test_rollouts_are_taken_apart_and_put_together",),
        "trainers/trl.py",
        (
            (
                '_PADDED_BY: ClassVar[Mapping[str, int]] = {"tool_mask": 1, "importance_sampling_ratio": 1}',
                '_PADDED_BY: ClassVar[Mapping[str, int]] = {"tool_mask": 1}',
            ),
        ),
    ),
    Mutant(
        "trainers-what-is-taken-may-have-other-labels",
        "A sample that is taken is not compared with what its rank's loader has made of it. A collator that masks at random has losses divided by a wrong number of labels, unnoticed.",
        ("tests/trainers/test_trainers_late.py::test_a_collator_that_makes_something_else_each_time_is_refused",),
        "trainers/late.py",
        (("if found != expected:", "if False and found != expected:"),),
    ),
    Mutant(
        "transports-a-fork-holds-the-links",
        "A forked DataLoader worker keeps the connections of its rank to other hosts open. When the rank dies they do not end, and the ranks there wait for it until the time limit.",
        (
            "tests/liveness/test_faults.py::test_a_rank_that_is_hurt_is_named_by_all_others[rank 1-gather.before-kill-with_a_child-2 hosts]",
        ),
        "odc/transports/_links.py",
        (("        os.register_at_fork(after_in_child=_close_inherited)", "        pass"),),
    ),
    Mutant(
        "transports-device-counters-do-not-wrap",
        "Words of 32 bits that a device counts in are compared as they are, without regard to their wrapping. After four billion pushes an order between streams is taken for kept that is not, or a wait never ends.",
        ("tests/minibatch/test_soak.py::test_words_of_streams_pass_their_limits",),
        "odc/transports/cuda_ipc.py",
        (
            (
                "reached: bool = (self._seen[rank][index] - count) % (2 * _HALF) < _HALF",
                "reached: bool = self._seen[rank][index] >= count % (2 * _HALF)",
            ),
        ),
    ),
    Mutant(
        "transports-farewell-overtakes-pushes",
        "A rank of another host counts as gone when its farewell is here, though its last signals are still on their way. At the end of a training a rank is now and then called gone that has done everything.",
        ("tests/transports/test_link.py::test_a_rank_has_left_only_when_all_that_it_posted_is_here",),
        "odc/transports/_link.py",
        (
            (
                "return self._closing is not Closing.OPEN and (self._has_said_all or self._ended is not None)",
                "return self._closing is not Closing.OPEN",
            ),
        ),
    ),
    Mutant(
        "transports-half-an-answer-is-accepted",
        "A read that ends because the connection has ended returns as if all bytes were there. After the death of a rank on another host a gather is half new and half old, and used.",
        ("tests/transports/test_link.py::test_the_end_of_the_connection_wakes_a_reader",),
        "odc/transports/_link.py",
        (
            (
                """            raise
        if reading.left > 0:
            self._require_alive()""",
                "            raise",
            ),
        ),
    ),
    Mutant(
        "transports-pieces-are-counted-from-their-own-beginning",
        "What begins far behind the first of several pieces of memory is put at the beginning of the second one. Behind the first 4 MiB of a gather from another host, parameters get the elements of others.",
        ("tests/transports/test_link.py::test_memory_in_several_pieces_travels_as_if_it_were_one",),
        "odc/transports/_frames.py",
        (("start, length = max(start - len(part), 0), length - len(piece)", "start, length = 0, length - len(piece)"),),
    ),
    Mutant(
        "transports-sleep-ignores-its-ticket",
        "Who sleeps for a signal looks at the word anew, and not at what it was when the ticket was taken: a missed wake. A signal that comes between look and sleep wakes nobody, and each such wait lasts a whole pause.",
        (
            "tests/transports/test_transport_conformance.py::test_sleep_with_a_ticket_from_before_a_signal_returns_at_once",
        ),
        "odc/transports/_control.py",
        (
            (
                "        signed = ticket - (1 << 32) if ticket >= 1 << 31 else ticket",
                """        ticket = self.ticket
        signed = ticket - (1 << 32) if ticket >= 1 << 31 else ticket""",
            ),
        ),
    ),
)
