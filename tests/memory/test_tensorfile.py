import hashlib
import json
import os
import resource

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.memory import tensorfile
from headrace.memory.tensorfile import Entry, TensorFile, sha256_of, write_tensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
RESERVED = "__metadata__"  # by the format, which has no tensor of that name
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(RESERVED.__ne__)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
layouts = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=6)


def random_bits(dtype, shape):
    """Any bit pattern of the dtype, NaNs and denormals included."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def raw(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def entries_of(tensors, piece):
    def pieces(tensor):
        flat = tensor.reshape(-1)
        return lambda: [flat[i : i + piece] for i in range(0, flat.numel(), piece)]

    return [Entry(name, t.dtype, tuple(t.shape), pieces(t)) for name, t in tensors.items()]


@settings(deadline=None, max_examples=60)
@given(layouts, st.integers(1, 50), st.dictionaries(names, st.text(max_size=5), max_size=2))
def test_safetensors_reads_what_we_write(tmp_path_factory, layout, piece, metadata):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    tensors = {name: random_bits(*spec) for name, spec in layout.items()}
    record = write_tensors(path, entries_of(tensors, piece), metadata)
    data = path.read_bytes()
    assert (record.name, record.size) == (path.name, len(data))
    assert record.sha256 == hashlib.sha256(data).hexdigest() == sha256_of(path)
    assert int.from_bytes(data[:8], "little") % 8 == 0
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata


@settings(deadline=None, max_examples=60)
@given(layouts, st.integers(1, 50))
def test_we_read_what_safetensors_writes(tmp_path_factory, layout, piece):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    tensors = {name: random_bits(*spec) for name, spec in layout.items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with TensorFile(path) as file:
        assert file.metadata == {"format": "pt"}
        assert file.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert same(file.read(name), tensor)
            target = torch.zeros_like(tensor)
            file.read_into(name, target.reshape(-1).split(piece))
            assert same(target, tensor)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(DTYPES[:4]), st.sampled_from(DTYPES[:4]), st.integers(0, 40), st.integers(1, 9))
def test_casts_in_both_directions_equal_torch(tmp_path_factory, stored, wanted, count, block):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    values = torch.randn(count, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "_BLOCK", block)
        write_tensors(path, [Entry.of("x", values, stored)])
        with TensorFile(path) as file:
            assert same(file.read("x"), values.to(stored))
            assert same(file.read("x", wanted), values.to(stored).to(wanted))


def test_scalars_and_non_contiguous_tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    scalar, matrix = torch.tensor(3.5), torch.nn.Parameter(torch.randn(4, 5).T)
    write_tensors(path, [Entry.of("scalar", scalar), Entry.of("matrix", matrix)])
    with TensorFile(path) as file:
        assert file.entries["scalar"].shape == ()
        assert file.read("scalar").item() == 3.5
        assert torch.equal(file.read("matrix"), matrix.detach())


def test_reading_works_without_preadv(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_tensors(path, [Entry.of("a", torch.arange(9)), Entry.of("b", torch.arange(5.0))])
    monkeypatch.delattr(os, "preadv")
    with TensorFile(path) as file:
        assert torch.equal(file.read("b"), torch.arange(5.0))
        assert torch.equal(file.read("a"), torch.arange(9))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_torn_file_is_refused_at_every_length(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "torn.safetensors"
    write_tensors(path, [Entry.of("a", torch.arange(9)), Entry.of("b", torch.ones(3, 3))])
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match=r"torn\.safetensors is not a complete safetensors file"):
        TensorFile(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="where its header promises"):
        TensorFile(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not json",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [2]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
)
def test_a_wrong_header_is_refused(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=r"x\.safetensors"):
        TensorFile(path)


def test_a_pointer_of_git_lfs_is_told_from_a_torn_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4096\n")
    with pytest.raises(
        UserError, match=r"model\.safetensors holds no tensors, only a pointer .* `git lfs pull`"
    ):
        TensorFile(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        TensorFile(tmp_path / "absent.safetensors")


def test_a_file_that_shrinks_while_open_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, [Entry.of("a", torch.arange(1000))])
    with TensorFile(path) as file:
        os.truncate(path, 4000)
        with pytest.raises(UserError, match="ends at byte 4000"):
            file.read("a")


def test_running_out_of_space_is_an_oserror_and_leaves_no_valid_file(tmp_path):
    path = tmp_path / "x.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError):
            write_tensors(path, [Entry.of(str(i), torch.zeros(10_000)) for i in range(5)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(UserError):
        TensorFile(path)


def test_pieces_that_do_not_fill_the_shape_are_a_bug(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(AssertionError, match="3 elements"):
        write_tensors(path, [Entry("x", torch.float32, (4,), lambda: [torch.zeros(3)])])
    write_tensors(path, [Entry.of("x", torch.zeros(4))])
    with TensorFile(path) as file:
        for count, reason in ((3, "fewer"), (5, "more")):
            with pytest.raises(AssertionError, match=reason):
                file.read_into("x", [torch.zeros(count)])


def test_the_header_is_plain_json(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, [Entry.of("b", torch.zeros(3, dtype=torch.bool)), Entry.of("x", torch.zeros(1))])
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header) == ["x", "b"], "wide dtypes first, so that every tensor is aligned"
