# Copies mgpu.cu or networks.cu: the operators that it defines get other names, plain_relu and so on.
# What calls relu then calls the function of fast.cu with this name. (For sed -zE)
s/\n((static )?(Tensor|void)) (conv2d|linear|relu|avg_pool2d|max_pool2d|add|batch_norm|sgd)(\([^;{]*\) \{)/\n\1 plain_\4\5/g
