"""What a policy would gain on a dataset, without training on it."""

from odc.balance.simulate.laws import even_lengths, law_names, sample_lengths
from odc.balance.simulate.machine import Machine
from odc.balance.simulate.modalities import ModalitySamples, sample_modalities
from odc.balance.simulate.simulator import PlannedEpoch, Scenario, Simulation

__all__ = [
    "Machine",
    "ModalitySamples",
    "PlannedEpoch",
    "Scenario",
    "Simulation",
    "even_lengths",
    "law_names",
    "sample_lengths",
    "sample_modalities",
]
