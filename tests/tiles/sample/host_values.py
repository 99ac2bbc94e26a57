"""What lowered host functions say for given m, by TVM's own substitution and arithmetic. Runs in a process of its own.

Usage: host_values.py kernels.json m... Of each of a list of {"program", "n", "k", "schedule", "arch"} it prints, in a list,
{"names": [...], m: {"maps": {...}, "grid", "block", "smem", "args"}}.
"""

import json
import sys

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.programs import program


def values_of(kernel, ms):
    target = target_from_name(kernel["arch"])
    workload, schedule = Workload(1, kernel["n"], kernel["k"]), Schedule.from_json(kernel["schedule"])
    function = program(kernel["program"]).build(workload, schedule, target)
    from tilebit.tiles.compiler.cuda import lower_cuda

    artifact = lower_cuda(function, target.arch)
    from tilelang import tvm

    (host,) = artifact.host_mod.functions.values()
    (device,) = artifact.device_mod.functions.values()
    calls = []
    tvm.tirx.stmt_functor.post_order_visit(
        host.body, lambda node: calls.append(node) if type(node).__name__ == "Call" and node.op.name == "tirx.tvm_call_packed" else None
    )
    tags = [str(t) for t in device.attrs["tirx.kernel_launch_params"]]
    answer: dict = {"names": [str(function.buffer_map[p].data) for p in function.params]}
    for m in ms:
        analyzer = tvm.arith.Analyzer()

        def value(expr, analyzer=analyzer, m=m):
            if expr.dtype == "handle":
                return str(expr)
            names = []
            tvm.tirx.stmt_functor.post_order_visit(expr, lambda node: names.append(node) if type(node).__name__ == "Var" else None)
            known = {v: tvm.tirx.IntImm(v.dtype, m) for v in names if str(v) == "m"}
            return getattr(analyzer.simplify(tvm.tirx.stmt_functor.substitute(expr, known)), "value")  # noqa: B009

        maps, launch = {}, {}
        for call in calls:
            values = call.args[1:]
            if call.args[0].value == "__tvm_tensormap_create_tiled":
                rank = int(values[2])
                rest = [value(v) for v in values[4:]]
                part = [rest[i * rank : (i + 1) * rank] for i in range(4)]
                maps[str(values[0])] = {
                    "dtype": value(values[1]),
                    "of": str(values[3]),
                    "dims": part[0],
                    "strides": part[1][1:],
                    "box": part[2],
                    "steps": part[3],
                    "options": rest[4 * rank :],
                }
            elif call.args[0].value == str(device.attrs["global_symbol"]):
                geometry = dict(zip(tags, [value(v) for v in values[len(values) - len(tags) :]], strict=True))
                launch = {
                    "grid": [geometry.get(f"blockIdx.{a}", 1) for a in "xyz"],
                    "block": [geometry.get(f"threadIdx.{a}", 1) for a in "xyz"],
                    "smem": geometry.get("tirx.use_dyn_shared_memory", 0),
                    "args": [value(v) for v in values[: len(values) - len(tags)]],
                }
        answer[m] = {"maps": maps, **launch}
    return answer


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps([values_of(kernel, [int(m) for m in sys.argv[2:]]) for kernel in json.load(file)]))
