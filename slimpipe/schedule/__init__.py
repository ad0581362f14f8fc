"""The schedule as pure data: built, checked, lowered, simulated and drawn with no GPU and no torch (DESIGN section 2).

`build` gives every rank's list of actions, `add_vocabulary` and `lower` add passes and transfers, `check` proves it
sound; `simulate`, `grid` and `draw_svg` show it. The runtime follows the lists and decides nothing.
"""

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.check import Peaks, check
from slimpipe.schedule.collectives import Collective
from slimpipe.schedule.costs import Costs, LinkCost, VocabularyCosts, equal_costs, output_layer_costs, sliced_costs
from slimpipe.schedule.csv_io import from_csv, to_csv
from slimpipe.schedule.draw import draw_svg
from slimpipe.schedule.flow import Flow, Rule, Span
from slimpipe.schedule.formulas import bubble_fraction, peak_activation
from slimpipe.schedule.grid import grid
from slimpipe.schedule.in_flight import peak_held, peak_units
from slimpipe.schedule.in_order import Report, least_send_window, replay_in_order
from slimpipe.schedule.kv_slots import RankSlots, SlotPlace, assign_kv_slots
from slimpipe.schedule.lower import lower
from slimpipe.schedule.orders import BUILT, NOT_BUILT, build, supported
from slimpipe.schedule.plan import Plan, PlanError, Shape
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.stages import place_layers
from slimpipe.schedule.timeline import Timeline
from slimpipe.schedule.transfers import Link, Tensor, links
from slimpipe.schedule.vocabulary import add_vocabulary
from slimpipe.schedule.wire import Transfer

__all__ = [
    "BUILT",
    "NOT_BUILT",
    "Action",
    "Collective",
    "Costs",
    "Flow",
    "Link",
    "LinkCost",
    "Op",
    "Peaks",
    "Plan",
    "PlanError",
    "RankSlots",
    "Report",
    "Rule",
    "Shape",
    "SlotPlace",
    "Span",
    "Tensor",
    "Timeline",
    "Transfer",
    "Unit",
    "VocabularyCosts",
    "add_vocabulary",
    "assign_kv_slots",
    "bubble_fraction",
    "build",
    "check",
    "draw_svg",
    "equal_costs",
    "from_csv",
    "grid",
    "least_send_window",
    "links",
    "lower",
    "output_layer_costs",
    "peak_activation",
    "peak_held",
    "peak_units",
    "place_layers",
    "replay_in_order",
    "simulate",
    "sliced_costs",
    "supported",
    "to_csv",
]
