"""Mutants that no test can notice, because the program behaves the same (`tests/mutants.py`)."""

# (file, line without leading and trailing spaces, new expression): why no test can notice the change.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "posjax/rotary/generators.py",
        "diagonal = omega[..., None] * np.eye(omega.shape[-1])",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "posjax/linear/kernels.py",
        "unit = x * jax.lax.rsqrt(jnp.where(squared > 0, squared, 1))",
        "2",
    ): "a vector of zeros stays zero, whatever it is multiplied by",
    (
        "posjax/masks/by_token.py",
        "return Segments(jnp.where(valid, 0, -1).astype(jnp.int32))",
        "1",
    ): "all valid tokens have the same id, and any id that is not negative will do",
    (
        "posjax/attention/api.py",
        "fewer = queries < keys",
        "(queries <= keys)",
    ): "if there are as many queries as keys, no error is raised and the message is not used",
    (
        "posjax/training_positions.py",
        "return jnp.sort(jax.lax.top_k(words, count)[1].astype(jnp.int32), axis=-1)",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "posjax/attention/checks.py",
        "return int(ahead[np.argmax(np.any(seen, axis=tuple(range(np.ndim(seen) - 1))))])",
        "2",
    ): "there is only one query, so its axis need not be reduced",
    (
        "posjax/masks/by_position.py",
        "return np.reshape(np.asarray(self.dilation, np.int32), (1, -1, 1, 1))",
        "2",
    ): "of the 1 in -1: NumPy infers the size for any negative number",
    (
        "posjax/attention/tpu/terms.py",
        "vector = jnp.zeros_like(sums, shape=(sums.shape[0], size))",
        "(jnp.ones_like(sums, shape=(sums.shape[0], size)))",
    ): "the function is linear, so its transpose is the same at every point",
    (
        "posjax/rotary/base.py",
        "for _ in range(6):",
        "7",
    ): "a seventh step of Newton's method only skips a little more of an interval that is negative anyway",
    (
        "posjax/attention/tpu/forward.py",
        "if kind.masked or len(found) > 1:",
        "(len(found) >= 1)",
    ): "with neither a mask nor remapped pairs, the pattern changes nothing",
    (
        "posjax/rotary/generators.py",
        'check_even("the size of the generators", matrices.shape[1])',
        "2",
    ): "the matrices are square",
    (
        "posjax/layout.py",
        "first, last = x.reshape(2, self.shards, -1, *x.shape[1:])",
        "2",
    ): "of the 1 in x.shape[1:]: -1 then includes the omitted axis, and the caller restores the shape",
    (
        "train/model/extension.py",
        'if {"factor", "original_length"} <= given.keys():',
        "({'factor', 'original_length'} < given.keys())",
    ): "the mapping also has the key 'name', so the two sets are never equal",
    (
        "posjax/attention/tpu/backward_dma.py",
        "wait = partial(for_pairs, row.pairs, choice, lambda _, to: row.stored(0, 0, to, third).wait())",
        "1",
    ): "waiting for a copy uses only its size, not its source",
    (
        "train/monitor/meter.py",
        '(getattr(device, "slice_index", 0), tuple(getattr(device, "coords", None) or (device.id,)))',
        "1",
    ): "either all devices have a slice_index or none has, so any default gives the same groups",
    (
        "posjax/rotary/base.py",
        "negative = np.flatnonzero(_sums(inverse_frequencies, start, stop) < 0)",
        "(_sums(inverse_frequencies, start, stop) <= 0)",
    ): "no sum of cosines is exactly 0",
    (
        "posjax/nn/huggingface/load.py",
        "model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))",
        "1",
    ): "of the seed: only the shapes of the parameters are used",
    (
        "posjax/nn/decoder.py",
        "graph, wanted = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))",
        "1",
    ): "of the seed: only the shapes of the parameters are used",
    (
        "posjax/rotary/base.py",
        "columns = math.isqrt(stop - start) + 1",
        "2",
    ): "the sums are the same for any number of columns",
    (
        "posjax/rotary/longrope.py",
        "return _Individual(tuple(steps.tolist()), a.first if random.random() < 0.5 else b.first)",
        "(random.random() <= 0.5)",
    ): "a random number is exactly 0.5 only once in 2^53",
    (
        "posjax/scales.py",
        "for _ in range(6):",
        "7",
    ): "after 6 steps the root is exact up to rounding",
    (
        "posjax/rotary/generators.py",
        "weights = np.random.default_rng(0).uniform(1, 2, len(matrices))",
        "1",
    ): "of the seed: any random mixture finds the planes",
    (
        "posjax/attention/tiles.py",
        "order = xp.argsort(xp.where(grid == 0, kinds + 1, grid), axis=-1, stable=True)",
        "2",
    ): "any number above all kinds puts empty tiles last",
    (
        "posjax/attention/tpu/forward_dma.py",
        "return [buffers, sums, pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((copies, 2))]",
        "3",
    ): "of the size in SMEM: one more number is never used",
    (
        "posjax/diagnostics/rotation.py",
        "return np.abs(_phasors(rule, distances, head_dim, options).cumsum(-1)).mean(-1)",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "train/model/sharding.py",
        'LENGTH_AXES = {"positions": -1, "coordinates": -2}',
        "(1)",
    ): "positions have two axes, so axes 1 and -1 are the same",
    (
        "posjax/diagnostics/anomaly.py",
        "query = 2 * jnp.square(q) + 0j",
        "3",
    ): "the places where a score rises are counted, and they do not depend on its scale",
    (
        "posjax/rotary/grids.py",
        "return self.unit * inverse_powers(self.base, width).reshape(-1, self.num_axes).T.ravel()",
        "2",
    ): "of the 1 in -1: NumPy infers the size for any negative number",
    (
        "train/model/flops.py",
        "q = jnp.zeros((1, few, heads, scheme.query_size(size)))",
        "2",
    ): "of the batch: only the size of the features is used",
    (
        "posjax/attention/tpu/biases.py",
        "return self.origins(row, 0)[1] - terms.column(row.of_head(row.x.bias.outer)[...])",
        "1",
    ): "of the 0 in (row, 0): only the origin of the keys is used, which does not depend on the block of queries",
    (
        "posjax/rotary/base.py",
        "farthest = np.argsort(sums[negative] / negative.astype(np.float64) ** 2)[:_WITNESSES]",
        "3",
    ): "any infeasible distances lead to the same base; the choice only saves steps",
    (
        "posjax/attention/tpu/blocks.py",
        "unit = 128 if tokens <= 1024 else 512",
        "(tokens < 1024)",
    ): "for 1,024 tokens both units give the same blocks",
    (
        "train/model/flops.py",
        "heads, size, few = decoder.num_heads, decoder.head_dim, 8",
        "9",
    ): "of the length: only the size of the features is used",
    (
        "train/model/flops.py",
        "q = jnp.zeros((1, few, heads, scheme.query_size(size)))",
        "(jnp.ones((1, few, heads, scheme.query_size(size))))",
    ): "only the size of the features is used",
    (
        "train/model/flops.py",
        'return scheme.maps.query(made.get("features", {}), q, Range(0, few), head_dim=size, length=few)',
        "1",
    ): "of the position: only the size of the features is used",
    (
        "train/model/flops.py",
        "return jax.eval_shape(phi, jax.random.key(0)).shape[-1]",
        "1",
    ): "of the seed: only the size of the features is used",
    (
        "posjax/_checks.py",
        "near = get_close_matches(str(value), close, n=1)",
        "2",
    ): "only the first, the nearest, is used",
    (
        "train/report/numbers.py",
        'return (row.get("window_tokens") or 0) // row["length"]',
        "1",
    ): "windows have more than one token",
    (
        "train/report/numbers.py",
        'return max(row.get("last_tokens") or 0 for row in rows) // last_length(rows)',
        "1",
    ): "the last tokens of a window are more than one",
    (
        "train/model/mesh.py",
        "named = math.prod(size for size in sizes.values() if size > 0)",
        "1",
    ): "leaving out factors of 1 changes no product",
    (
        "posjax/_slots.py",
        "position = jnp.zeros(1, jnp.int32)",
        "(jnp.ones(1, jnp.int32))",
    ): "only the shape of the tile is used",
    (
        "posjax/_slots.py",
        "one = narrowed(self, queries=(0, 1), keys=(0, 1))",
        "1",
    ): "of both starts: only the shape of the tile is used",
    (
        "posjax/attention/operands.py",
        "return np.zeros(leaf.shape, jax.dtypes.float0)",
        "(np.ones(leaf.shape, jax.dtypes.float0))",
    ): "numbers of float0 have no value",
    (
        "posjax/attention/padding.py",
        "ids = np.where(np.arange(keys) < true, 0, -1).astype(np.int32)",
        "2",
    ): "of the 1 in -1: any id but that of the queries hides the keys",
    (
        "posjax/rotary/tpu.py",
        "size = partners.shape[0]",
        "1",
    ): "the permutation is a square matrix",
    (
        "posjax/attention/own.py",
        "cut = narrowed(on_device(part), queries=(0, sides[0]), keys=(0, sides[1]))",
        "1",
    ): "of both starts: only the shape and dtype of the tile are used",
    (
        "train/model/flops.py",
        "kinds = max([1, *(len(each) for each in _dilations(whole))])",
        "2",
    ): "if heads do not differ, the mean of two equal masks is that of one",
    (
        "posjax/nn/mlp.py",
        "return chosen, jax.nn.softmax(largest, axis=-1)",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "train/data/pipeline.py",
        "ahead = grain.ReadOptions(num_threads=8 if remote else 1, prefetch_buffer_size=8 if remote else 4)",
        "5",
    ): "how many batches are read ahead changes none of them",
    (
        "posjax/layout.py",
        "chunks = x.reshape(self.shards, 2, -1, *x.shape[1:])",
        "2",
    ): "of the 1 in x.shape[1:]: -1 then includes the omitted axis, and the caller restores the shape",
    (
        "posjax/diagnostics/rotation.py",
        "return _phasors(rule, distances, head_dim, options).real.mean(-1)",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "train/model/mesh.py",
        "named = math.prod(size for size in sizes.values() if size > 0)",
        "(size >= 0)",
    ): "no axis has size 0: the config refuses it",
    (
        "train/model/mesh.py",
        'slices = len({getattr(device, "slice_index", 0) for device in used})',
        "1",
    ): "either all devices have a slice_index or none has",
    (
        "train/model/flops.py",
        "step = max(1, _BLOCK // len(_seen(mask, np.zeros(1, np.int64), True)))",
        "(_BLOCK * len(_seen(mask, np.zeros(1, np.int64), True)))",
    ): "blocks of any size give the same numbers; only the memory differs",
    (
        "train/model/flops.py",
        "return (0, at + 1) if keys else (at, END)",
        "2",
    ): "only keys up to the query are counted",
    (
        "train/compare/study/measure.py",
        "return whole(next_nll(predictor, parameters, tokens, cell.length)[0])",
        "1",
    ): "all rows are copies of one",
    (
        "train/compare/study/measure.py",
        "logits = whole(predictor.logits(predictor.ready(parameters), hidden)[0])",
        "1",
    ): "all rows are copies of one",
    (
        "train/compare/study/measure.py",
        "chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, -size:, None], axis=-1)",
        "1",
    ): "all rows are copies of one, and the array has two axes",
    (
        "train/compare/study/measure.py",
        "chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, -size:, None], axis=-1)",
        "(1)",
    ): "all rows are copies of one, and the array has two axes",
    (
        "train/compare/study/measure.py",
        "return best(logits) == tokens[0, -size:], -chosen.mean()",
        "1",
    ): "all rows are copies of one",
    (
        "train/evaluate/tasks/common_words.py",
        "room -= seldom * _sizes(vocabulary, [word]).sum()",
        "(_sizes(vocabulary, [word]).mean())",
    ): "the array has one number",
    (
        "train/evaluate/tasks/common_words.py",
        "return compose(vocabulary, length, _OPENING, drawn(generator), [_written(words)], [1.0], ending)",
        "2.0",
    ): "any depth of at least 1 is the end",
    (
        "posjax/attention/sharded/placement.py",
        "sizes = Sizes(batch // devices, length, heads // split, local_kv_heads, shards)",
        "(batch * devices)",
    ): "only the error of the chosen strategy is used, and none depends on the batch",
    (
        "posjax/coca/tpu.py",
        'return channels.reshape(size // 2, -1).T if pairing == "interleaved" else channels.reshape(-1, size // 2)',
        "2",
    ): "of the 1 in -1: NumPy infers the size for any negative number",
    (
        "train/loop/loss.py",
        "return jax.nn.logsumexp(logits, axis=-1), jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]",
        "1",
    ): "JAX clamps an index beyond the only column",
    (
        "train/loop/loss.py",
        "column = jnp.where(label % chunks == part, label // chunks, -1)",
        "2",
    ): "of the 1 in -1: any negative number is no column",
    (
        "train/loop/loss.py",
        "is_label = _is_label(label, number, chunks, columns.shape[-1])",
        "(1)",
    ): "the array has two axes, so axes 1 and -1 are the same",
    (
        "train/evaluate/windows.py",
        "return count if wanted >= total else max(1, math.floor(wanted / total * count))",
        "(wanted > total)",
    ): "if they are equal, the rounded share is count too",
    (
        "train/evaluate/search.py",
        "rows = jnp.broadcast_to(pair[0], (predictor.filled(1), *pair[0].shape))",
        "2",
    ): "of filled(1): only the first row is used",
    (
        "train/evaluate/generate.py",
        "if int(token[0]) in ends:",
        "1",
    ): "JAX clamps an index beyond the only row",
    (
        "train/evaluate/generate.py",
        "yield int(token[0])",
        "1",
    ): "JAX clamps an index beyond the only row",
    (
        "train/evaluate/generate.py",
        "return logits[:, -1], cache",
        "2",
    ): "of the 1 in -1: the axis has size 1, and JAX clamps the index",
    (
        "posjax/nn/huggingface/family.py",
        "period = next(n for n in range(1, count + 1) if all(schemes[i] == schemes[i % n] for i in range(count)))",
        "2",
    ): "a period of 1 is returned before, and count always is a period",
    (
        "posjax/nn/huggingface/family.py",
        "stated = stated or 0",
        "1",
    ): "lengths are at least 1, so 1 changes no maximum and is never above the original length",
    (
        "posjax/nn/huggingface/load.py",
        "stack, put = jnp.zeros(struct.shape, struct.dtype, device=whole), _put(whole)",
        "(jnp.ones(struct.shape, struct.dtype, device=whole))",
    ): "all rows are overwritten",
    (
        "posjax/nn/huggingface/save.py",
        "for layer, name in zip([-1] if layers is None else layers, tensors, strict=True):",
        "2",
    ): "of the 1 in -1: any negative number is before layer 0",
    (
        "posjax/rotary/coordinates.py",
        "return np.indices(sizes, dtype=np.int32).reshape(len(sizes), -1).T",
        "2",
    ): "of the 1 in -1: NumPy infers the size for any negative number",
    (
        "posjax/training_positions.py",
        "words = jax.random.bits(key, (batch, size), jnp.uint32) | jnp.uint32(1)",
        "2",
    ): "any bit that is set makes the word positive",
}
