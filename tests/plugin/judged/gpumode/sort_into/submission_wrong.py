def custom_kernel(data):
    values, output = data
    output.copy_(values)
    output[: len(values) // 2] = values[: len(values) // 2].sort()[0]
    return output
