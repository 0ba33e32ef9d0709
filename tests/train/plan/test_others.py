"""Attention kernels of other libraries, from small listings whose bundles are counted by hand."""

import json
from pathlib import Path

import pytest

from posjax.scheme import uniform
from posjax.scheme.presets import scheme
from train.plan.hlo import Instruction, parse
from train.plan.kernels import visited_share
from train.plan.others import AnyKernels, blocks_in_metadata, others_call, parse_blocks
from train.plan.pods import pod

BLOCK, HEADS, LENGTH = 1024, 6, 4096
ROWS, STEPS, TILES = HEADS * 4, HEADS * 16, HEADS * 10
START, TILE, FINISH = 20, 3000, 18
SLOTS = 4
NAME = "splash_mha_fwd_segmented_residuals"
OP_NAME = "jit(train_step)/jvp()/while/body/splash_mha_fwd/pallas_call"


def listing(trips: int = STEPS + 2, tile: int = TILE) -> str:
    """A loop over a grid with three conditionals, of which the second multiplies matrices."""
    count, lines = 0, []

    def add(text: str, label: str = "  ", depth: str = ">") -> None:
        nonlocal count
        lines.append(f"  {hex(count) if count else '   0'} {label}: {depth} {text}")
        count += 1

    def skipped(region: int, body: str, times: int) -> None:
        add(f"{{ %b = sbr.rel (%p{region}) target = $region{region} }}")
        for _ in range(SLOTS):
            add("{}", depth=" ")
        for _ in range(times):
            add(body)
        add(f"{{ %m = vmov 0 }} /* Start/End empty region {region} */", "PF")

    add("{ %s1 = smov 0 } /* entry bundle: %k = custom-call(%a) */", depth=" ")
    add("{ %s3 = sadd.s32 1, %s2 } /* Start region 1 */", "LB")
    skipped(2, "{ %v1 = vst %v0 }", START)
    skipped(3, "{ %v2 = vmatmul.bf16.gmra.mxu0 %v0 }", tile)
    skipped(4, "{ %v3 = vst %v0 }", FINISH)
    add(f"{{ %p7 = scmp.ge.s32.totalorder %s3, {trips} }}")
    add("{ %b = sbr.rel (!%p7) target = $region1 }")
    add("{ %e = vsyncpa [#allocation3], 1 }", depth=" ")
    return "\n".join(lines) + "\n"


def dump(directory: Path, text: str, name: str = f"{NAME}.2") -> Path:
    """Writes the files that the compiler dumps for one kernel."""
    uses = "".join(f"{int('vmatmul' in line)} 0\n" for line in text.splitlines())
    written = {
        "packed-bundles-post-ra": text,
        "final_hlo-static-per-bundle-utilization": f"==:\nMXU, XLU\n4 1\n== UTILIZATION:\n{uses}",
        "final_bundles": text,
    }
    for number, (kind, body) in enumerate(written.items()):
        (directory / f"17-{name}-0{number}-{kind}.txt").write_text(body)
    return directory


def call(name: str = f"{NAME}.2", metadata: str = "", queries: int = LENGTH) -> Instruction:
    """A call of a kernel for three rows with two heads each."""
    q, k = f"bf16[3,2,{queries},128]{{3,2,1,0}}", f"bf16[3,2,{LENGTH},128]{{3,2,1,0}}"
    text = (
        f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  ROOT %{name} = ({q}, f32[3,2,{queries}]{{2,1,0}}) custom-call(%x), "
        f'custom_call_target="tpu_custom_call", operand_layout_constraints={{s8[1,4,4]{{2,1,0}}, {q}, {k}, {k}}}, '
        f'frontend_attributes={{kernel_metadata={metadata or "{}"}}}, metadata={{op_name="{OP_NAME}"}}\n}}'
    )
    return parse(text).computations["main"][0]


def kernels(**more) -> AnyKernels:
    share = visited_share(uniform(scheme("rope"), 1), LENGTH, causal=True)
    return AnyKernels(pod("v6e:2x2"), share, **more)


def metadata(**sizes: int) -> str:
    """The format in a program: JSON in a string in JSON, on separate lines."""
    return "{\n" + json.dumps({"xprof_metadata": json.dumps(sizes)}, separators=(",", ":"))[1:-1] + "\n}"


def test_a_kernel_takes_the_bundles_of_its_tiles_and_rows(tmp_path):
    found = kernels(schedules=dump(tmp_path, listing()), blocks=(BLOCK, BLOCK, BLOCK)).seconds(call())
    around = 1 + 3 * (1 + SLOTS) + 3 + 2
    cycles = 2 + (STEPS + 2) * around + ROWS * (START + FINISH) + TILES * TILE
    assert found == pytest.approx(cycles / 1.75e9)


def test_a_tile_takes_no_less_than_its_products(tmp_path):
    found = kernels(schedules=dump(tmp_path, listing(tile=1500)), blocks=(BLOCK, BLOCK, BLOCK)).seconds(call())
    least = 2 * BLOCK * BLOCK * 256 / 262144  # two products; a head of 128 fills half of the arrays
    around = 1 + 3 * (1 + SLOTS) + 3 + 2
    assert found == pytest.approx((2 + (STEPS + 2) * around + ROWS * (START + FINISH) + TILES * least) / 1.75e9)


def test_blocks_are_read_from_the_call():
    sizes = {"block_q": 512, "block_kv": 1024, "block_kv_compute": 256, "block_q_dkv": None}
    assert blocks_in_metadata(call(metadata=metadata(**sizes))) == (512, 1024, 256)
    sizes = {"block_q_dkv": 2048, "block_kv_dkv": 512, "block_kv_dkv_compute": None}
    assert blocks_in_metadata(call("splash_mha_dkv_segmented_no_residuals.1", metadata(**sizes))) == (2048, 512, 512)
    assert call(metadata=metadata(**sizes)).op_name == OP_NAME  # it follows the blocks in the text
    assert blocks_in_metadata(call()) is None
    assert others_call(call(), (8, 16, 16)).blocks == (8, 16, 16)
    assert others_call(call(metadata=metadata(block_q=512, block_kv=1024)), (8, 16, 16)).blocks == (512, 1024, 1024)


def test_heads_are_counted_over_the_batch():
    found = others_call(call())
    assert (found.heads, found.queries, found.keys, found.head_dim) == (6, LENGTH, LENGTH, 128)


def test_what_is_not_known_stays_unknown(tmp_path):
    blocks = (BLOCK, BLOCK, BLOCK)
    dumped = dump(tmp_path, listing())
    assert kernels(blocks=blocks).seconds(call()) is None  # no schedules
    assert kernels(schedules=dumped).seconds(call()) is None  # no blocks
    assert kernels(schedules=dumped, blocks=blocks).seconds(call("splash_mha_dq_no_residuals.1")) is None
    assert kernels(schedules=dumped, blocks=blocks).seconds(call("someones_kernel.1")) is None
    wrong = tuple(2 * size for size in blocks)  # the grid has another number of steps
    assert kernels(schedules=dumped, blocks=wrong).seconds(call()) is None


def test_half_of_the_queries_take_half_of_the_time(tmp_path):
    blocks = (BLOCK, BLOCK, BLOCK)
    whole = kernels(schedules=dump(tmp_path, listing()), blocks=blocks).seconds(call())
    part = tmp_path / "part"
    part.mkdir()
    found = kernels(schedules=dump(part, listing(STEPS // 2 + 2)), blocks=blocks).seconds(call(queries=LENGTH // 2))
    assert found == pytest.approx(whole / 2, rel=1e-3)


def test_a_kernel_that_ran_twice_is_found_without_its_number(tmp_path):
    found = kernels(schedules=dump(tmp_path, listing()), blocks=(BLOCK, BLOCK, BLOCK))
    assert found.seconds(call(f"{NAME}.7")) == found.seconds(call())


@pytest.mark.parametrize("text", ["", "2048", "2048,x", "0,1024", "1,2,3,4"])
def test_invalid_blocks_are_refused(text):
    with pytest.raises(ValueError, match=r"--blocks: expected .* as in 2048,2048,512, found"):
        parse_blocks(text)


def test_blocks_on_the_command_line():
    assert parse_blocks("2048,1024") == (2048, 1024, 1024)
    assert parse_blocks("2048, 1024, 512") == (2048, 1024, 512)
