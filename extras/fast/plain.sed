# Copies mgpu.cu or networks.cu: what fast.cu replaces gets another name, plain_relu and so on, or is
# left out. What calls relu then calls the function of fast.cu with this name. (For sed -zE)
s/\n((static )?(Tensor|void|Stream &)) ?(conv2d|linear|relu|avg_pool2d|max_pool2d|add|batch_norm|sgd|current_stream)(\([^;{]*\) \{)/\n\1 plain_\4\5/g
s/\nfloat \*Tensor::ptr\(\) const \{[^\n]*/\n/
