"""What the prefill programs call on the device: the functions of ``device/kv/prefill.cuh`` with
their template arguments, and the fields of what these keep."""

from dataclasses import dataclass
from math import e, log2

from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ..compiler.headers import TYPES, literal

TURNS, GROUPS = 3, 6  # first named barriers of the warpgroups' turns and of each warpgroup alone; the generated code uses 0 to 2
# Fields of `tilebit::PrefillTile`, ints in this order.
ROWS, FIRST_ROW, FIRST_KEY, KEYS, MASKED, CLEAR, STEPS, FIELDS = 0, 1, 2, 3, 6, 7, 8, 11
STATE_FLOATS = 6  # of `tilebit::RowState`
NO_MASK, MASK, MASK_WHERE_NEEDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PrefillCalls:
    """The functions of ``device/kv/prefill.cuh`` with their template arguments, for one (workload,
    schedule)."""

    workload: AttentionWorkload
    schedule: Schedule

    def find(self, threads: int) -> str:
        """``threads``: of a block."""
        w, s = self.workload, self.schedule
        return f"tilebit::find_tile_or_exit<{threads}, {s.block_m}, {s.block_n}, {w.window}, {w.sink_tokens}>"

    @property
    def key(self) -> str:
        return f"tilebit::step_key<{self.schedule.block_n}>"

    def softmax(self, masking: int) -> str:
        w, s = self.workload, self.schedule
        return f"tilebit::softmax_step<{s.block_n}, {w.window}, {w.sink_tokens}, {_cpp(w.soft_cap > 0)}, {masking}>"

    @property
    def round_weights(self) -> str:
        return f"tilebit::round_weights<{TYPES[self.workload.dtype]}, {self.schedule.block_n}>"

    @property
    def rescale(self) -> str:
        return f"tilebit::rescale_rows<{self.workload.head_dim}>"

    def finish(self, threads: int) -> str:
        """``threads`` share the products that read their rows of the queries, whose place the
        output is staged in."""
        w = self.workload
        tile = f"{TYPES[w.dtype]}, {self.schedule.block_m}, {w.head_dim}"
        return f"tilebit::finish_rows<{tile}, {_cpp(w.sinks)}, {_cpp(w.lse)}, {threads}, {GROUPS}>"

    @property
    def scale(self) -> float:
        """What a score is multiplied by to be an exponent of 2; of capped scores, tanh(..), the
        cap's."""
        w = self.workload
        return literal((w.soft_cap or w.softmax_scale) * log2(e))

    @property
    def argument(self) -> float:
        """What makes q.k the exponent of 2 in tanh(x) = 1 - 2 / (1 + exp(2 x)); 0 without a cap."""
        w = self.workload
        return literal(2 * log2(e) * w.softmax_scale / w.soft_cap) if w.soft_cap else 0.0


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"
