// Activations and their gradients, with PyTorch's roundings: the result of each PyTorch operation
// is rounded to the elements' type; computation within an operation is float32.
#pragma once

#include "gemm_code.cuh"

enum Activation { kNone, kSilu, kGeluTanh, kGelu, kRelu };

DEVICE float tanh_inner(float x)
{
    constexpr float kBeta = 0.7978845608028654f, kKappa = 0.044715f;  // sqrt(2 / pi)
    return hyperbolic_tangent(kBeta * (x + kKappa * x * x * x));
}

template <u32 kActivation>
DEVICE float activated(float x)
{
    if (kActivation == kSilu)
        return quotient(x, 1.0f + exponential(-x));
    if (kActivation == kGeluTanh)
        return 0.5f * x * (1.0f + tanh_inner(x));
    if (kActivation == kGelu)
        return x * 0.5f * (1.0f + error_function(x * 0.7071067811865476f));
    if (kActivation == kRelu)
        return x > 0.0f || x != x ? x : 0.0f;
    return x;
}

// The derivative of the activation at x.
template <u32 kActivation>
DEVICE float slope(float x)
{
    if (kActivation == kSilu) {
        const float sigmoid = quotient(1.0f, 1.0f + exponential(-x));
        return sigmoid * (1.0f + x * (1.0f - sigmoid));
    }
    if (kActivation == kGeluTanh) {
        constexpr float kBeta = 0.7978845608028654f, kKappa = 0.044715f;
        const float inner = tanh_inner(x);
        const float rise = kBeta * (1.0f + 3.0f * kKappa * x * x);
        return 0.5f * (1.0f + inner) + 0.5f * x * (1.0f - inner * inner) * rise;
    }
    if (kActivation == kGelu) {
        const float density = exponential(-0.5f * x * x) * 0.3989422804014327f;  // 1 / sqrt(2 pi)
        return 0.5f * (1.0f + error_function(x * 0.7071067811865476f)) + x * density;
    }
    if (kActivation == kRelu)
        return x > 0.0f ? 1.0f : 0.0f;
    return 1.0f;
}

template <class Format, u32 kActivation>
DEVICE u32 activated_word(u32 gate)
{
    return Format::pack(activated<kActivation>(Format::low(gate)),
                        activated<kActivation>(Format::high(gate)));
}

template <class Format>
DEVICE u32 product_word(u32 a, u32 b)
{
    return Format::pack(Format::low(a) * Format::low(b), Format::high(a) * Format::high(b));
}

// activation(gate) * up, for both elements of a word.
template <class Format, u32 kActivation>
DEVICE u32 gated_word(u32 gate, u32 up)
{
    return product_word<Format>(activated_word<Format, kActivation>(gate), up);
}

// The gradient of gate, for both elements of a word; `grad` is that of activation(gate).
template <class Format, u32 kActivation>
DEVICE u32 gate_gradient_word(u32 gate, u32 grad)
{
    return Format::pack(Format::low(grad) * slope<kActivation>(Format::low(gate)),
                        Format::high(grad) * slope<kActivation>(Format::high(gate)));
}
