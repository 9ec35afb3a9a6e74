// A CUDA device that computes nothing, for a build of torch without CUDA: autograd then accepts tensors that
// say they are on `cuda:0`. Every query about the device has one answer, and streams and events do nothing.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceType kind = DeviceType::CUDA;

Device only_device() {
  return Device(kind, 0);
}

Stream only_stream() {
  return Stream(Stream::DEFAULT, only_device());
}

class Guard final : public c10::impl::NoOpDeviceGuardImpl<kind> {
 public:
  Device getDevice() const override { return only_device(); }
  Device exchangeDevice(Device) const override { return only_device(); }
  Stream getStream(Device) const noexcept override { return only_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return only_stream(); }
  // Streams end in order, so every event has happened.
  bool queryEvent(void*) const override { return true; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

} // namespace

namespace at {

class Hooks final : public CUDAHooksInterface {
 public:
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

} // namespace at
