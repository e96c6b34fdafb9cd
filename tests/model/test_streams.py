"""What is derived from streams, on the example of the module's own picture and on random rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from thoughtbubbles.model.streams import bubble_scan, bubble_sizes, find_bubbles, is_original, originals, positions

TOKEN = torch.tensor([[0, 1, 1, 2, 2, 2]])  # the last token has three streams
PADDED = torch.tensor([[0, 0, 1, 3, 3, 3]])  # T = 3, a row of two tokens and three unused slots


def test_a_small_row():
    bubbles = find_bubbles(TOKEN, 3)
    assert bubbles.start.tolist() == [[0, 1, 1, 3, 3, 3]]
    assert bubbles.end.tolist() == [[0, 2, 2, 5, 5, 5]]
    assert is_original(TOKEN, bubbles, 3).tolist() == [[True, False, True, False, False, True]]
    assert originals(TOKEN, 3).tolist() == [[0, 2, 5]]
    assert bubble_sizes(TOKEN, 3).tolist() == [[1, 2, 3]]


def test_positions_are_exact():
    """k − p/q computed directly: thirds come out as the nearest float32, not as a drifting sum."""
    found = positions(TOKEN + 500, find_bubbles(TOKEN, 3), torch.float32)
    expected = torch.tensor([[500, 501 - 1 / 2, 501, 502 - 2 / 3, 502 - 1 / 3, 502]])
    assert torch.equal(found, expected)


def test_unused_slots_are_bubbles_of_their_own():
    bubbles = find_bubbles(PADDED, 3)
    assert bubbles.start.tolist() == [[0, 0, 2, 3, 4, 5]]
    assert bubbles.end.tolist() == [[1, 1, 2, 3, 4, 5]]
    assert bubble_sizes(PADDED, 3).tolist() == [[2, 1, 0]]
    assert not is_original(PADDED, bubbles, 3)[0, 3:].any()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.sampled_from(["add", "maximum", "logaddexp"]))
def test_scan_gives_the_original_its_whole_bubble(sizes, operation):
    token = torch.tensor([[t for t, size in enumerate(sizes) for _ in range(size)]])
    values = torch.randn(1, token.shape[1], 2, dtype=torch.float64)
    bubbles = find_bubbles(token, len(sizes))
    scanned = bubble_scan(values, bubbles.start, getattr(torch, operation), max_bubble=8)
    whole = {"add": torch.sum, "maximum": torch.amax, "logaddexp": torch.logsumexp}[operation]
    for t, original in enumerate(originals(token, len(sizes))[0].tolist()):
        torch.testing.assert_close(scanned[0, original], whole(values[0, token[0] == t], dim=0))
