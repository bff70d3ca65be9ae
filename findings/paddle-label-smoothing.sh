#!/bin/bash
# With label smoothing, Paddle's cross_entropy divides by the number of classes as well if
# ignore_index is 0 or more. With ten classes, the mean is a tenth of the loss, and its gradient is
# a tenth, too, even if no label is the one to ignore. If a label is, it is not ignored. Nothing
# tells you so, and with SGD the network learns as if the learning rate were a tenth. The mean is
# right without smoothing, and with a negative ignore_index, such as the default, -100. The
# documentation says that ignore_index is valid unless the labels are soft. Here they are hard, the
# numbers of classes, but smoothing turns them into soft ones. Leave out the images to ignore before
# you compute the loss.
#
# The scores of the four images are 0, so the loss of each is log(10) = 2.3026, with and without
# smoothing. Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6 and paddlepaddle 3.3.1:
#
#     label_smoothing 0.0, labels [3, 1, 4, 1], ignore_index -100
#         none: 2.3026 2.3026 2.3026 2.3026
#         mean: 2.3026
#         gradient of the first image's score 3: -0.2250
#     label_smoothing 0.0, labels [3, 1, 4, 1], ignore_index 9
#         none: 2.3026 2.3026 2.3026 2.3026
#         mean: 2.3026
#         gradient of the first image's score 3: -0.2250
#     label_smoothing 0.0, labels [3, 1, 4, 9], ignore_index 9
#         none: 2.3026 2.3026 2.3026 0.0000
#         mean: 2.3026
#         gradient of the first image's score 3: -0.3000
#     label_smoothing 0.1, labels [3, 1, 4, 1], ignore_index -100
#         none: 2.3026 2.3026 2.3026 2.3026
#         mean: 2.3026
#         gradient of the first image's score 3: -0.2025
#     label_smoothing 0.1, labels [3, 1, 4, 1], ignore_index 9
#         none: 2.3026 2.3026 2.3026 2.3026
#         mean: 0.2303
#         gradient of the first image's score 3: -0.0202
#     label_smoothing 0.1, labels [3, 1, 4, 9], ignore_index 9
#         none: 2.3026 2.3026 2.3026 2.3026
#         mean: 0.2303
#         gradient of the first image's score 3: -0.0202
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 paddlepaddle==3.3.1 networkx==3.6.1 \
    opt-einsum==3.3.0 protobuf==7.36.2 safetensors==0.8.0 typing_extensions==4.16.0 \
    pillow==13.0.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 idna==3.20 \
    certifi==2026.10.19.post1
export PYTHONPATH=$folder/packages

cat >"$folder/loss.py" <<'END'
import paddle
from paddle.nn.functional import cross_entropy

for smoothing in 0.0, 0.1:
    for labels, ignore_index in ([3, 1, 4, 1], -100), ([3, 1, 4, 1], 9), ([3, 1, 4, 9], 9):
        print(f"label_smoothing {smoothing}, labels {labels}, ignore_index {ignore_index}")
        scores = paddle.zeros([4, 10])
        scores.stop_gradient = False
        options = dict(label_smoothing=smoothing, ignore_index=ignore_index)
        for reduction in "none", "mean":
            loss = cross_entropy(scores, paddle.to_tensor(labels), reduction=reduction, **options)
            numbers = " ".join(f"{number:.4f}" for number in loss.flatten().tolist())
            print(f"    {reduction}: {numbers}")
        loss.backward()
        print(f"    gradient of the first image's score 3: {scores.grad[0, 3].item():.4f}")
END
python3 "$folder/loss.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
