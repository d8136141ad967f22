def custom_kernel(data):
    return data.double().sum().float()
