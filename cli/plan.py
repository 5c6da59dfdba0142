"""``odc plan`` shows what balancing policies would do to a dataset. Each kind of plan is a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from odc.balance import Machine, Policy, Scenario, get_policy, policy_names
from odc.balance.costs.devices import DEVICES
from odc.balance.plan import Comm
from odc.balance.rearrange.from_home import FromHome
from odc.balance.simulate.hosts import Network, parse_network
from odc.cli import hosts as over_hosts
from odc.cli import options
from odc.cli.comparison import ByOrder, Study, compare, reordered, report
from odc.cli.context_parallel import POLICIES, compare_sizes, parse_groups, report_groups
from odc.cli.costs import Training
from odc.cli.given import Given, takes
from odc.cli.keys import chosen
from odc.cli.lengths import check_enough, cut, some_of
from odc.cli.modalities import parse_modalities, read_dataset
from odc.cli.output import progress
from odc.cli.phase_report import report_phases
from odc.cli.phases import compare_phases
from odc.cli.rollouts import LINK, describe_moved, moved
from odc.cli.settings import OF_COSTS, Settings, all_but

DEFAULT_POLICIES = ("none", "local-sort", "lb-micro", "lb-micro-global", "lb-mini")
_GROUPED_POLICIES = ("none", "lb-micro-global", "lb-mini")
"""Compared for grouped lengths unless others are named: plain FSDP, and the best of each kind of communication."""


@takes(*all_but())
def plan(given: Given, max_tokens: options.MaxTokens = None, policy: options.Policies = None) -> None:
    """Show what each balancing policy would do to a dataset: bubble rate, samples/s, planning time, memory.

    Ranks wait for each other at every layer with FSDP's collectives, once per optimizer step with ODC. Nothing
    is trained and no GPU is needed: plans are simulated on a cost model of the transformer.

    Groups of devices, several hosts, rollouts, and samples of several modalities have plans of their own, each with
    its options (-h). What is rarely changed is a key of --set, below.

    Examples:

        odc plan data.jsonl --field text --plot plan.png

        odc plan context-parallel longalign --sizes 1,2,4,8

        odc plan hosts lengths.txt --hosts 2 --between 100Gb

        odc plan rollouts aime --ranks-per-node 8

        odc plan modalities mix.jsonl --modality vision:timings=vit.csv
    """
    policies = list(map(get_policy, chosen_policies(policy, DEFAULT_POLICIES)))
    _report(given, _compare(given, max_tokens, policies, _grouped(given, policy)))


@takes(*all_but())
def hosts(
    given: Given,
    hosts: options.Hosts = 2,
    between: options.Between = None,
    max_tokens: options.MaxTokens = None,
    policy: options.Policies = None,
) -> None:
    """Show what crosses between hosts, how much of that compute hides, and how to shard, beside what policies do.

    Policies are compared with what FSDP and ODC do by default: full sharding, and parameters and gradients shared in
    each host. Then the best policies are compared for each way to shard. With HSDP, FSDP all-reduces in the last
    microbatch only (set_requires_all_reduce), and nothing hides that.

    Examples:

        odc plan hosts lengths.txt --world-size 16 --hosts 2 --between 100Gb
    """
    network = parse_network(hosts, between, given.world_size, given.device)
    policies = list(map(get_policy, chosen_policies(policy, DEFAULT_POLICIES)))
    _report(given, _compare(given, max_tokens, policies, _grouped(given, policy), network), network)


@takes(*all_but("reorder"))
def rollouts(
    given: Given,
    ranks_per_node: options.RanksPerNode = None,
    hosts: options.Hosts = 1,
    between: options.Between = None,
    max_tokens: options.MaxTokens = None,
    policy: options.Policies = None,
) -> None:
    """Show what policies do to rollouts: each of these is on some rank before its length is known.

    Plans keep samples on their ranks as far as the policy can; the samples that move are counted.

    Examples:

        odc plan rollouts aime --world-size 16 --ranks-per-node 8
    """
    network = parse_network(hosts, between, given.world_size, given.device)
    policies = [FromHome(get_policy(name), ranks_per_node) for name in chosen_policies(policy, DEFAULT_POLICIES)]
    found = _compare(given, max_tokens, policies, [], network)
    bytes_per_s = DEVICES[given.device].links[LINK]
    planned = found["shuffled"].planned
    moves = {name: moved(epoch, ranks_per_node, bytes_per_s) for name, epoch in planned.items()}
    _report(
        given,
        found,
        network,
        {"moved": {name: asdict(each) for name, each in moves.items()}},
        [describe_moved(moves, with_nodes=ranks_per_node is not None)],
    )


@takes(*all_but("reorder", "panel"))
def context_parallel(
    given: Given,
    sizes: options.Sizes,
    link: options.Link = "nvlink",
    max_tokens: options.MaxTokens = None,
    policy: options.Policies = None,
) -> None:
    """Compare groups of devices, each of which computes its microbatches together.

    What the longest samples hold up, groups divide. All sizes are given the same samples in each step.

    Examples:

        odc plan context-parallel longalign --sizes 1,2,4,8 --link infiniband
    """
    groups = parse_groups(sizes, link, given.world_size, given.device)
    policies = chosen_policies(policy, POLICIES)
    study = _study(given, max_tokens, devices=min(groups))
    num_minibatches = np.size(study.scenario.lengths) // (given.world_size * given.minibatch_size)
    with progress("planning", num_minibatches * len(policies) * len(groups)) as update:
        found = compare_sizes(study, policies, groups, partial(update, advance=1))
    report_groups(found, as_json=given.as_json, plot=given.plot)


@takes(*OF_COSTS, "recompute", "minibatches")
def modalities(
    given: Given,
    modality: options.Modalities,
    ranks_per_node: options.RanksPerNode = None,
    max_tokens: options.MaxTokens = None,
) -> None:
    """Show what balancing samples of several modalities would gain, with one --modality per encoder.

    {"length": 812, "vision": [[1024, 256], [576, 144]]} has the length of the whole sequence, and of each item its
    length in the encoder and the rows that come out of it. Compared is what balancing nothing, the language model,
    whole samples, all phases, or their sum would do.

    Examples:

        odc plan modalities mix.jsonl --modality audio:layers=6,hidden=512,ffn=2048
    """
    training = given.training()
    found = parse_modalities(modality, given.settings.mfu * training.device.flops_per_s)
    items = read_dataset(given.lengths, found, given.reader())
    check_enough(items.tokens.size, given.lengths, given.minibatch_size, given.world_size)
    with progress("planning") as update:
        phases = compare_phases(
            items,
            found,
            training,
            num_ranks=given.world_size,
            minibatch_size=given.minibatch_size,
            max_tokens=max_tokens,
            ranks_per_node=ranks_per_node,
            num_minibatches=given.settings.minibatches,
            seed=given.settings.seed,
            on_plan=lambda done, total: update(completed=done, total=total),
        )
    report_phases(phases, as_json=given.as_json, plot=given.plot)


def chosen_policies(named: list[str] | None, default: Sequence[str]) -> list[str]:
    """The policies to compare, each once.

    Raises:
        ValueError: a name is not known.
    """
    names = chosen("--policy", named, default, ["all", *policy_names()])
    return policy_names() if "all" in names else names


def _grouped(given: Given, named: list[str] | None) -> list[str]:
    """The policies to compare for grouped lengths."""
    return chosen_policies(named, _GROUPED_POLICIES) if given.settings.reorder else []


# Plans of samples that have one length each


def _study(given: Given, max_tokens: int | None, *, hosts: int = 1, devices: int = 1) -> Study:
    """Read the lengths. No sample is longer than what ``devices`` together hold."""
    settings = given.settings
    training = given.training(hosts=hosts, with_transfers=True)
    dataset = given.read_lengths(settings.samples)
    tokens = cut(dataset.tokens, max_tokens, truncate=settings.truncate, devices=devices)
    check_enough(tokens.size, given.lengths, given.minibatch_size, given.world_size)
    scenario = Scenario(
        some_of(tokens, settings.minibatches * given.world_size * given.minibatch_size, settings.seed),
        training.cost,
        given.world_size,
        given.minibatch_size,
        max_tokens=int(tokens.max()) if max_tokens is None else max_tokens,
        batch_size=settings.batch_size,
        microbatch_cost=training.microbatch_s,
        speeds=settings.speeds,
        seed=settings.seed,
    )
    return Study(scenario, tokens, dataset.about, training, _machines(settings, training))


def _machines(settings: Settings, training: Training) -> dict[Comm, Machine]:
    """What each kind of communication meets within a host."""
    gather, scatter = training.transfers_s
    fsdp = Machine(
        noise=settings.noise,
        seed=settings.seed,
        overlap=settings.overlap,
        forward_share=1 / 4 if training.recompute else 1 / 3,
        num_layers=training.shape.num_layers,
        gather=gather,
        scatter=scatter,
    )
    slower = settings.odc_slower
    return {"collective": fsdp, "odc": replace(fsdp, gather=gather * slower, scatter=scatter * slower)}


def _compare(
    given: Given,
    max_tokens: int | None,
    policies: Sequence[Policy],
    grouped: Sequence[str],
    network: Network | None = None,
) -> ByOrder:
    """Plan and simulate all of them, on these hosts, and those of grouped lengths."""
    panel = given.settings.panel
    if panel != "all" and given.plot is None:
        raise ValueError(f"--set panel={panel} is drawn into a file: expected --plot too, e.g. --plot {panel}.png")
    study = _study(given, max_tokens, hosts=1 if network is None else network.num_hosts)
    if network is not None:
        study = replace(study, machines=over_hosts.usual(study.machines, network, study.training))
    with progress("planning", len(study.scenario.sampler("none")) * (len(policies) + len(grouped))) as update:
        on_minibatch = partial(update, advance=1)
        return reordered(compare(study, policies, on_minibatch), grouped, on_minibatch)


def _report(
    given: Given,
    found: ByOrder,
    network: Network | None = None,
    further: Mapping[str, object] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> None:
    """Draw and print what was found; ``further`` entries of JSON, and ``notes`` for people."""
    comparison = found["shuffled"]
    inside = _machines(given.settings, comparison.training)
    ways = [] if network is None else over_hosts.compare_ways(network, comparison, inside)
    if given.plot is not None:
        from odc.cli.plots import plot_plan  # matplotlib takes a while to import

        with progress("drawing"):
            plot_plan(given.plot, comparison, minibatch_only=given.settings.panel == "minibatch")
    report(
        found,
        {**({"ways": over_hosts.to_json(ways)} if ways else {}), **further},
        as_json=given.as_json,
        plot=given.plot,
        notes=notes,
        behind=[] if network is None else over_hosts.describe_ways(ways, network),
    )
