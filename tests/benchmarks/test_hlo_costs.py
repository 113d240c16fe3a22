"""Operations and traffic that are counted in the text of a compiled program."""

import pytest

from benchmarks.compiled.hlo_costs import Costs, program_costs

MATMUL = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)
PROGRAM = """
%body (loop: (f32[3,8], f32[4,8])) -> (f32[3,8], f32[4,8]) {
  %loop = (f32[3,8]{1,0}, f32[4,8]{1,0}) parameter(0)
  %stack = f32[3,8]{1,0} get-tuple-element(%loop), index=0
  %row = f32[1,8]{1,0} fusion(%stack, %step), kind=kLoop, calls=%sliced
  %rest = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %next = (f32[3,8]{1,0}, f32[4,8]{1,0}) tuple(%stack, %rest)
}

%sliced (array: f32[3,8], number: s32[]) -> f32[1,8] {
  %array = f32[3,8]{1,0} parameter(0)
  %view = f32[3,8]{1,0} bitcast(%array)
  %number = s32[] parameter(1)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%view, %number), dynamic_slice_sizes={1,8}
}

%updated (whole: f32[3,8], part: bf16[1,8], at: s32[]) -> f32[3,8] {
  %whole = f32[3,8]{1,0} parameter(0)
  %part = bf16[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %wide = f32[1,8]{1,0} convert(%part)
  ROOT %update = f32[3,8]{1,0} dynamic-update-slice(%whole, %wide, %at)
}

ENTRY %main (left: bf16[4,8], right: bf16[8,16]) -> f32[4,16] {
  %left = bf16[4,8]{1,0} parameter(0)
  %right = bf16[8,16]{1,0} parameter(1)
  @LINES@
  ROOT %out = f32[4,16]{1,0} bitcast(%left)
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"3"}}'


@pytest.mark.parametrize(
    ("lines", "flops", "moved"),
    [
        # Two operations for each of 4 x 16 results and 8 products; the workspace s8 is not written.
        (
            f"%product = (f32[4,16]{{1,0}}, s8[1024]{{0}}) custom-call(%left, %right), {MATMUL}",
            2 * 4 * 16 * 8,
            4 * 16 * 4 + (4 * 8 + 8 * 16) * 2,
        ),
        ("%sum = bf16[4,8]{1,0} add(%left, %left)", 0, 3 * 4 * 8 * 2),
        # A slice of 8 floats is read and written, beside its place of 4 bytes.
        (f"%loop = (f32[3,8], f32[4,8]) while(%left), condition=%c, body=%body, {TRIPS}", 0, 3 * (64 + 4)),
        ("%loop = (f32[3,8], f32[4,8]) while(%left), condition=%c, body=%body", 0, 5 * (64 + 4)),
        # In place: 8 half floats are read and 8 floats written.
        ("%new = f32[3,8]{1,0} fusion(%left, %right, %left), kind=kLoop, calls=%updated", 0, 16 + 32 + 4),
    ],
    ids=["product", "sum", "loop", "loop of unknown length", "update in place"],
)
def test_costs_of_an_instruction(lines, flops, moved):
    costs = program_costs(PROGRAM.replace("@LINES@", lines), other_trips=5)
    assert costs == Costs(flops, moved)
