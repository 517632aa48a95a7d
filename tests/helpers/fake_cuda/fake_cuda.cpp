// Says that eight GPUs and cuDNN are there, to torch without a GPU. Nothing is ever computed: FakeTensorMode asks for devices,
// streams and what the hooks can do, and no kernel runs. `lane.py` compiles and loads it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current = 0;

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    const auto index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::DEFAULT, {c10::DeviceType::CUDA, index});
  }
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return kDevices; }
  at::DeviceIndex getCurrentDevice() const override { return current; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
};

}  // namespace

namespace at {
// Builds of torch with CUDA have hooks of their own, of default priority; they are looked up once, by the first who asks.
using ::FakeHooks;
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, FakeHooks)
}  // namespace at

// The last guard that is registered is the one in use, so this is called when torch has registered its own.
extern "C" void use_fake_guard() {
  static const FakeGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
