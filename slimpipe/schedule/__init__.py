"""The schedule as pure data: built, checked, lowered, simulated and drawn with no GPU and no torch
(docs/architecture.md).

`build` gives every rank's list of actions; `balance` and `add_exchange`, `add_vocabulary`, `lower`, `add_swap` add
loans, passes, transfers and swaps, in this order; `check` proves it sound; `simulate`, `grid` and `draw_svg` show it.
`forward_only`, right behind `build`, makes it an evaluation's. The runtime follows the lists and decides nothing.
"""

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.balance import balance, default_granule
from slimpipe.schedule.check import Peaks, check
from slimpipe.schedule.collectives import Collective
from slimpipe.schedule.collector import collector_paused
from slimpipe.schedule.costs import Costs, LinkCost, VocabularyCosts, equal_costs, output_layer_costs, sliced_costs
from slimpipe.schedule.csv_io import from_csv, to_csv
from slimpipe.schedule.draw import draw_svg
from slimpipe.schedule.exchange import add_exchange, exchange_refusal
from slimpipe.schedule.exchange_report import buffer_bytes, forward_bytes, max_imbalance, pairwise_bound
from slimpipe.schedule.exchange_transfers import Piece, Posting, postings
from slimpipe.schedule.flow import Flow, Rule, Span
from slimpipe.schedule.formulas import bubble_fraction, peak_activation
from slimpipe.schedule.forward_only import forward_only
from slimpipe.schedule.gatherings import Gatherings
from slimpipe.schedule.granularity import Granularity, best_granularity, if_shorter
from slimpipe.schedule.grid import grid
from slimpipe.schedule.held import Held, held_by_units, most_held
from slimpipe.schedule.host_link import HostCopy, HostLinks
from slimpipe.schedule.in_flight import peak_held, peak_kept, peak_units
from slimpipe.schedule.in_order import Report, least_send_window, replay_in_order
from slimpipe.schedule.kv_slots import RankSlots, SlotPlace, assign_kv_slots
from slimpipe.schedule.kv_stream import KVStream, moves_of
from slimpipe.schedule.layer_times import LayerByLayer
from slimpipe.schedule.lending import without
from slimpipe.schedule.loan_cost import LoanBytes, Network, Rate, worth_it
from slimpipe.schedule.loans import MODES, Exchange, Loan, Mode
from slimpipe.schedule.lower import lower
from slimpipe.schedule.moves import Passes
from slimpipe.schedule.orders import BUILT, NOT_BUILT, build, supported
from slimpipe.schedule.plan import Plan, PlanError, Shape
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.slot_times import SlotTimes, Together
from slimpipe.schedule.slots import Slot, Slots, slots_of
from slimpipe.schedule.stages import place_layers
from slimpipe.schedule.swap import Swap, Trip, UnitBytes, add_swap
from slimpipe.schedule.swap_choice import least_swap, share_swap
from slimpipe.schedule.swap_units import PLANNED_SHARE
from slimpipe.schedule.timeline import Timeline
from slimpipe.schedule.transfers import Link, Tensor, links
from slimpipe.schedule.vocabulary import add_vocabulary
from slimpipe.schedule.wire import Transfer
from slimpipe.schedule.work import Load, Work, sliced_work

__all__ = [
    "share_swap",
    "most_held",
    "least_swap",
    "held_by_units",
    "add_swap",
    "UnitBytes",
    "Trip",
    "Swap",
    "PLANNED_SHARE",
    "HostLinks",
    "HostCopy",
    "Held",
    "BUILT",
    "MODES",
    "NOT_BUILT",
    "Action",
    "Collective",
    "Costs",
    "Exchange",
    "Flow",
    "Gatherings",
    "Granularity",
    "KVStream",
    "LayerByLayer",
    "Link",
    "LinkCost",
    "Load",
    "Loan",
    "LoanBytes",
    "Mode",
    "Network",
    "Op",
    "Passes",
    "Peaks",
    "Piece",
    "Plan",
    "PlanError",
    "Posting",
    "RankSlots",
    "Rate",
    "Report",
    "Rule",
    "Shape",
    "Slot",
    "SlotPlace",
    "SlotTimes",
    "Slots",
    "Span",
    "Tensor",
    "Timeline",
    "Together",
    "Transfer",
    "Unit",
    "VocabularyCosts",
    "Work",
    "add_exchange",
    "add_vocabulary",
    "assign_kv_slots",
    "balance",
    "best_granularity",
    "bubble_fraction",
    "buffer_bytes",
    "build",
    "check",
    "collector_paused",
    "default_granule",
    "draw_svg",
    "equal_costs",
    "exchange_refusal",
    "forward_bytes",
    "forward_only",
    "from_csv",
    "grid",
    "if_shorter",
    "least_send_window",
    "links",
    "lower",
    "moves_of",
    "max_imbalance",
    "output_layer_costs",
    "pairwise_bound",
    "peak_activation",
    "peak_held",
    "peak_kept",
    "peak_units",
    "place_layers",
    "postings",
    "replay_in_order",
    "simulate",
    "sliced_costs",
    "sliced_work",
    "slots_of",
    "supported",
    "to_csv",
    "without",
    "worth_it",
]
