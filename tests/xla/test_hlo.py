"""What devices exchange, read from the text of compiled programs, of CPUs and of TPUs."""

from __future__ import annotations

from quantkit.xla.hlo import Collective, count_exchanges

LOOP = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%condition (state: (s32[], f32[4,8])) -> pred[] {
  %state = (s32[], f32[4,8]) parameter(0)
  %number = s32[] get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} constant(32)
  ROOT %less = pred[] compare(%number, %limit), direction=LT
}

%all-reduce-scatter.1 (input: bf16[4,64]) -> bf16[4,16] {
  %input = bf16[4,64] parameter(0)
  ROOT %all-reduce.2 = bf16[4,64] all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %state = (s32[], f32[4,8]) parameter(0)
  %codes = s4[16,8]{1,0} all-gather(%part), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %fused = bf16[4,16] fusion(%state), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %next = (s32[], f32[4,8]) tuple(%number, %codes)
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8] parameter(0)
  %loop = (s32[], f32[4,8]) while(%start), condition=%condition, body=%body
  %total = f32[4,8]{1,0} all-reduce(%p), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%add
}
"""  # noqa: E501


def test_loops_count_in_each_round() -> None:
    assert count_exchanges(LOOP) == {
        Collective("all-gather", (0, 4), "s4", (16, 8)): 32,
        Collective("reduce-scatter", (0, 1, 2, 3), "bf16", (4, 64)): 32,
        Collective("all-reduce", (0, 4), "f32", (4, 8)): 1,
    }
    sizes = {one.kind: one.bytes for one in count_exchanges(LOOP)}
    assert sizes == {"all-gather": 64, "reduce-scatter": 512, "all-reduce": 128}


def test_a_collective_that_several_fusions_share_is_one() -> None:
    gather = "s4[16] all-gather(%p), channel_id=9, replica_groups={{0,1}}, dimensions={0}"
    parts = "".join(
        f"%part.{number} (p: s4[8]) -> s4[16] {{\n  %p = s4[8] parameter(0)\n  ROOT %all ="
        f" {gather}\n}}\n\n"
        for number in range(3)
    )
    body = "".join(
        f"  %fusion.{number} = s4[16] fusion(%p), kind=kCustom, calls=%part.{number}\n"
        for number in range(3)
    )
    program = f"{parts}ENTRY %main (p: s4[8]) -> s4[16] {{\n  %p = s4[8] parameter(0)\n{body}}}\n"
    assert count_exchanges(program) == {Collective("all-gather", (0, 1), "s4", (16,)): 1}


def test_a_loop_may_state_its_rounds() -> None:
    stated = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert max(count_exchanges(stated).values()) == 7


DEVICES_OF_GROUPS: dict[str, tuple[int, ...]] = {
    "replica_groups={{0,2},{1,3}}": (0, 2),
    "replica_groups=[2,4]<=[8]": (0, 1, 2, 3),
    "replica_groups=[4,2]<=[2,4]T(1,0)": (0, 4),
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2)": (0, 1, 4, 5),
    "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}": (0, 2),
    "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}": (0, 1, 4, 5),
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}": (0, 2),
    "replica_groups=mesh['a'=8] {'a':(2)2}": (0, 2),
    "source_target_pairs={{0,3},{3,0}}": (0, 3),
    "channel_id=1": (),
}


def test_who_exchanges() -> None:
    for groups, devices in DEVICES_OF_GROUPS.items():
        kind = "collective-permute" if "pairs" in groups else "all-gather"
        program = (
            f"ENTRY %main (p: f32[2]) -> f32[4] {{\n  %all = f32[4] {kind}(%p), {groups},"
            " dimensions={0}\n}\n"
        )
        (exchange,) = count_exchanges(program)
        assert exchange.devices == devices, groups


def test_several_arrays_together() -> None:
    program = (
        "ENTRY %main (p: f32[2], q: u4[8]) -> f32[2] {\n  %both = (f32[2]{0}, u4[8]{0})"
        " all-reduce(f32[2]{0} %p, u4[8]{0} %q), replica_groups={{0,1}}, to_apply=%add\n  %start ="
        " (f32[2]{0}, f32[4]{0}) all-gather-start(f32[2]{0} %p), replica_groups={{0,1}},"
        " dimensions={0}\n}\n"
    )
    assert count_exchanges(program) == {
        Collective("all-reduce", (0, 1), "f32", (2,)): 1,
        Collective("all-reduce", (0, 1), "u4", (8,)): 1,
        Collective("all-gather", (0, 1), "f32", (4,)): 1,
    }
