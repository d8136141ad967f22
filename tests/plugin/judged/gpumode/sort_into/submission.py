def custom_kernel(data):
    values, output = data
    output.copy_(values.sort()[0])
    return output
