#!/bin/bash
# On a CPU, JAX's gradient of a convolution with respect to its input is wrong for some paddings,
# such as one of 2 or 3 before a row and none after it, where the kernel is 2 wide. This gradient is
# a convolution, too, and its padding is negative before the row and positive after it. XLA's CPU
# convolution does not append zeros there but goes on with the numbers of the next row. No error is
# raised, and the loss itself is right. An image with one channel is not affected. XLA's issue 48713
# describes the same for a convolution with such a padding, but here no padding is negative. Pad
# with jnp.pad and convolve with "VALID".
#
# The images are 2 x 4, with 3 channels, and go to 4 channels. The kernel is 1 x 2. The loss is
# linear, so differences of it are the gradient, too. This prints the first row of each. Seen on
# Linux, x86-64, with Python 3.11, numpy 2.4.6, jax 0.10.2 and jaxlib 0.10.2:
#
#     padding (1, 0): differences 12 20 28 16
#     padding (1, 0): gradient 12 20 28 16, with jnp.pad 12 20 28 16
#     padding (2, 0): differences 20 28 36 20
#     padding (2, 0): gradient 20 28 36 44, with jnp.pad 20 28 36 20
#     padding (3, 0): differences 28 36 44 24
#     padding (3, 0): gradient 28 36 44 52, with jnp.pad 28 36 44 24
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 \
    opt_einsum==3.4.0 scipy==1.17.1
export PYTHONPATH=$folder/packages JAX_PLATFORMS=cpu

cat >"$folder/gradient.py" <<'END'
import jax
import jax.numpy as jnp

height, width = 2, 4
image = jnp.ones((1, 3, height, width))
kernel = jnp.ones((4, 3, 1, 2))


def loss(x, padding, use_jnp_pad=False):
    widths = ((0, 0), padding)
    if use_jnp_pad:
        x = jnp.pad(x, ((0, 0), (0, 0), *widths))
        widths = "VALID"
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), widths)
    return (y * jnp.arange(1, 1 + y[0, 0].size).reshape(y[0, 0].shape)).sum()


def first_row(x):
    return " ".join(f"{number:g}" for number in x[0, 0, 0].tolist())


for padding in (1, 0), (2, 0), (3, 0):
    changed = [image.at[0, 0, 0, j].add(1) for j in range(width)]
    differences = jnp.array([loss(x, padding) - loss(image, padding) for x in changed])
    print(f"padding {padding}: differences {first_row(differences.reshape(1, 1, 1, width))}")
    gradient = jax.grad(loss)(image, padding)
    padded = jax.grad(loss)(image, padding, use_jnp_pad=True)
    print(f"padding {padding}: gradient {first_row(gradient)}, with jnp.pad {first_row(padded)}")
END
python3 "$folder/gradient.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
