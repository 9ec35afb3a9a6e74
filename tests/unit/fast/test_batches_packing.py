"""Rows packed into micro-batches: each once, within the budget, prompts paid for once."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.fast.batches import pack_groups, pack_padded

GROUPS = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=8)),
    min_size=1,
    max_size=8,
)


def read(groups):
    prompts, lengths, rows = [], [], []
    for prompt, own in groups:
        rows.append(list(range(len(lengths), len(lengths) + len(own))))
        lengths += own
        prompts += [prompt] * len(own)
    return rows, prompts, lengths


def pack(groups, budget):
    rows, prompts, lengths = read(groups)
    return pack_groups(rows, prompts, lengths, budget), rows, prompts, lengths


@given(GROUPS, st.integers(1, 400))
def test_every_row_is_in_one_pack_that_fits(groups, budget):
    packs, rows, prompts, lengths = pack(groups, budget)
    assert sorted(row for found in packs for row in found.rows) == list(range(len(lengths)))
    for found in packs:
        shared = sum(prompts[group[0]] for group in rows if not set(group).isdisjoint(found.rows))
        own = sum(lengths[row] - 1 + prompts[row] // 8 for row in found.rows)
        # Pieces of one group that meet again are counted with a prompt each.
        assert shared + own <= found.tokens
        assert found.tokens <= budget or len(found.rows) == 1


@given(GROUPS, st.integers(1, 400))
def test_padding_counts_where_rows_are_padded(groups, budget):
    _, prompts, lengths = read(groups)
    packs = pack_padded(prompts, lengths, budget)
    assert sorted(row for found in packs for row in found.rows) == list(range(len(lengths)))
    for found in packs:
        longest = max(prompts[row] for row in found.rows) + max(lengths[row] for row in found.rows)
        assert found.tokens == len(found.rows) * longest
        assert found.tokens <= budget or len(found.rows) == 1


@given(GROUPS)
def test_one_pack_where_all_fits(groups):
    rows, prompts, lengths = read(groups)
    whole = len(lengths) * (max(prompts) + max(lengths))
    assert len(pack_groups(rows, prompts, lengths, 2 * whole)) == 1
    assert len(pack_padded(prompts, lengths, whole)) == 1


def test_the_longest_come_first_and_a_group_stays_together():
    packs, _, _, _ = pack([(10, [5, 5]), (10, [40, 30]), (10, [5, 3])], 80)
    assert [found.rows for found in packs] == [[2, 3], [0, 1, 4, 5]]
    assert [found.tokens for found in packs] == [80, 38]


def test_a_group_too_large_is_cut():
    packs, _, _, _ = pack([(10, [10, 10, 10])], 30)
    assert [found.rows for found in packs] == [[0, 1], [2]]


def test_copies_of_a_long_prompt_count():
    packs, _, _, _ = pack([(80, [2] * 8)], 120)
    assert [len(found.rows) for found in packs] == [3, 3, 2]
