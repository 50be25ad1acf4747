"""Peephole fusion on a trace. Each pass replaces a few neighbouring nodes by one that does the same arithmetic in the
same order: the bytes never change, only trips through memory and barriers are saved."""

from __future__ import annotations

from octavo.runtime.trace import Node, Value


def fuse(nodes: list[Node]) -> list[Node]:
    fused = fuse_rope_write_kv(fuse_silu_mul(fuse_residual_add(nodes)))
    pack_inputs_of_products(fused)
    return fused


def count_uses(nodes: list[Node]) -> dict[Value, int]:
    """How many nodes read each root value."""
    uses: dict[Value, int] = {}
    for node in nodes:
        for value in node.inputs:
            uses[value.root] = uses.get(value.root, 0) + 1
    return uses


def fuse_residual_add(nodes: list[Node]) -> list[Node]:
    """linear, then add(x, of it) -> linear_add: the product's tiles are added to x as they are finished."""
    uses = count_uses(nodes)
    fused: list[Node] = []
    for node in nodes:
        product = fused[-1] if fused else None
        if (
            node.op == "add"
            and product is not None
            and product.op == "linear"
            and product.output is node.inputs[1]
            and uses[node.inputs[1]] == 1
        ):
            fused[-1] = Node("linear_add", (*product.inputs, node.inputs[0]), node.output, product.constants)
        else:
            fused.append(node)
    return fused


def fuse_silu_mul(nodes: list[Node]) -> list[Node]:
    """linear, then silu_mul of it -> linear_silu_mul: the product of twice the width is never written."""
    uses = count_uses(nodes)
    fused: list[Node] = []
    for node in nodes:
        product = fused[-1] if fused else None
        if (
            node.op == "silu_mul"
            and product is not None
            and product.op == "linear"
            and product.output is node.inputs[0]
            and uses[node.inputs[0]] == 1
            and product.constants["weight"].can_fuse_silu_mul
        ):
            fused[-1] = Node("linear_silu_mul", product.inputs, node.output, product.constants)
        else:
            fused.append(node)
    return fused


def fuse_rope_write_kv(nodes: list[Node]) -> list[Node]:
    """rope of q, rope of k, write_kv -> rope_write_kv, which turns q and k where they stand."""
    fused: list[Node] = []
    renamed: dict[Value, Value] = {}  # the turned q is the unturned one, overwritten
    for node in nodes:
        node = Node(node.op, tuple(renamed.get(v, v) for v in node.inputs), node.output, node.constants)
        fused.append(node)
        if [n.op for n in fused[-3:]] != ["rope", "rope", "write_kv"]:
            continue
        turn_q, turn_k, write = fused[-3:]
        if write.inputs[0] is not turn_k.output or turn_q.constants["table"] is not turn_k.constants["table"]:
            continue
        assert turn_q.output is not None
        q, k, v = turn_q.inputs[0], turn_k.inputs[0], write.inputs[1]
        renamed[turn_q.output] = q
        fused[-3:] = [Node("rope_write_kv", (q, k, v), None, turn_q.constants | write.constants)]
    return fused


def pack_inputs_of_products(nodes: list[Node]) -> None:
    """What only products read is left by rms_norm and linear_silu_mul in the form that they read: it is not written as
    float32, read again and rounded by each worker."""
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            readers.setdefault(value.root, []).append(node)

    def packs(node: Node) -> bool:
        if node.op == "linear_silu_mul":  # its own blocks of rows must be those of its reader
            return bool(node.constants["weight"].packed_factor)
        return node.op == "rms_norm"

    def wanted_factor(node: Node, value: Value) -> float:
        is_product = node.op in ("linear", "linear_add", "linear_silu_mul")
        return float(node.constants["weight"].packed_factor) if is_product and node.inputs[0] is value else 0.0

    for node in nodes:
        value = node.output
        if value is not None and packs(node):
            factors = {wanted_factor(reader, value) for reader in readers.get(value, ())}
            value.packed = factors.pop() if len(factors) == 1 else 0.0
